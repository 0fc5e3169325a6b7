#!/usr/bin/env sh
# An emulator of older processors, for the tests of int8 where there is no VNNI: as root on Debian it is installed.
command -v qemu-x86_64 >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends qemu-user; } >/dev/null 2>&1
fi
command -v qemu-x86_64 >/dev/null || echo "no qemu-x86_64 (package qemu-user): int8 without VNNI is left out" >&2
