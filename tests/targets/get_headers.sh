#!/bin/sh
# ONNX Runtime's C headers for the test that compiles the C++ program of CPU bundles: ONNX Runtime's wheels have the
# library and no headers. Debian packages them from release 13 on; the package is unpacked, not installed.
# usage: get_headers.sh FOLDER    leaves FOLDER/usr/include/onnxruntime; without Debian's apt it says so and ends well
set -eu
folder=$1
[ -f "$folder/usr/include/onnxruntime/onnxruntime_c_api.h" ] && exit 0
[ -f /usr/include/onnxruntime/onnxruntime_c_api.h ] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "no apt here: ONNX Runtime's headers aren't fetched, and its C++ test skips" >&2
    exit 0
fi
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$work/sources.list"
options="-o Dir::Etc::SourceList=$work/sources.list -o Dir::Etc::SourceParts=/nonexistent -o Dir::State::Lists=$work/lists
    -o Dir::Cache=$work/cache -o Acquire::Languages=none -o APT::Sandbox::User=root"
# shellcheck disable=SC2086
(cd "$work" && apt-get -qq $options update && apt-get -qq $options download libonnxruntime-dev)
mkdir -p "$folder"
dpkg-deb -x "$work"/libonnxruntime-dev_*.deb "$folder"
