#!/bin/sh
# Brings a Chromium for the web tests where that can be done without asking: as root on a Debian with its registry in
# reach. Says plainly where it couldn't; tests that need a browser are then skipped (and fail in continuous integration).
for name in "${PACKAGER_BROWSER:-}" chromium chromium-browser google-chrome google-chrome-stable chrome; do
    if [ -n "$name" ] && command -v "$name" > /dev/null; then
        exit 0
    fi
done
if [ "$(uname)" = Darwin ] && [ -d "/Applications/Google Chrome.app" ]; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    if { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } > /dev/null 2>&1; then
        exit 0
    fi
    echo "chromium couldn't be installed by apt-get: web bundles are checked in Node only" >&2
    exit 0
fi
echo "there is no Chromium here: web bundles are checked in Node only (Debian: apt-get install chromium)" >&2
