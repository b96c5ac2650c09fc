#!/usr/bin/env bash
# Builds Sandlock into target/sandlock, for rows of the bench. Version and checksum are pinned; minutes the first time,
# quick when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.9.0
sum=1bb6f02c9070945effef71e61a7377e49ea13ae27bb624965be4b7b9bab280dc
into=target/sandlock
[[ -x $into/bin/sandlock && $("$into/bin/sandlock" --version) == "sandlock $version" ]] && exit 0
rm -rf "$into"
cargo install -q --locked --version "=$version" --root "$into" --target-dir "$into/build" sandlock-cli
# What cargo has built is what it has fetched: its own index says the sum of each file, and this is the one that was looked at.
crate=$(find "${CARGO_HOME:-$HOME/.cargo}/registry/cache" -name "sandlock-cli-$version.crate" -print -quit)
if ! sha256sum --check --quiet <<<"$sum  $crate"; then
    rm -rf "$into"
    echo "get-sandlock: this is another sandlock-cli $version" >&2
    exit 1
fi
rm -rf "$into/build"
