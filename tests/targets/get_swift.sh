#!/bin/sh
# A Swift toolchain for the ios target's checks: Debian's own packages, in a Debian root that only these checks enter.
# Debian 12 and older have no Swift; 13 has it in its main archive. Needs root, debootstrap (installed if absent) and
# about 3 GB under the user's cache folder. Does nothing where the toolchain is there already.
set -eu
base="${XDG_CACHE_HOME:-$HOME/.cache}/packager-swift"
root="${PACKAGER_SWIFT:-$base/trixie}"
mirror="$(sed -n -e 's|^deb \(http[^ ]*/debian/*\) .*|\1|p' -e 's|^URIs: \(http[^ ]*/debian/*\)$|\1|p' \
    /etc/apt/sources.list /etc/apt/sources.list.d/*.sources 2>/dev/null | head -n 1)"
if [ -x "$root/usr/libexec/swift/bin/swift" ] && [ -f "$root/usr/include/onnxruntime/onnxruntime_c_api.h" ]; then
    echo "swift: $root"
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || [ -z "$mirror" ]; then
    echo "swift: can't be fetched here: that needs root on Debian. Elsewhere install Swift 6 and the C headers of" \
        "ONNX Runtime (/usr/include/onnxruntime) yourself; without them packager runs the model file instead."
    exit 0
fi
command -v debootstrap >/dev/null || apt-get -q -y install debootstrap
mkdir -p "$base"
building="$root.building"
rm -rf "$building"
debootstrap --variant=minbase \
    --include=swiftlang,libc6-dev,libstdc++-14-dev,git,ca-certificates trixie "$building" "$mirror"
# Of ONNX Runtime only the headers: the library is the one of the Python package.
unshare --mount --pid --fork sh -euc '
    mount -t proc proc "$1/proc"
    chroot "$1" sh -euc "cd /tmp; apt-get -q download libonnxruntime-dev; dpkg -x libonnxruntime-dev_*.deb /; rm -f *.deb"
' headers "$building"
mkdir -p "$building/mnt/work"
mv "$building" "$root"
echo "swift: $root"
