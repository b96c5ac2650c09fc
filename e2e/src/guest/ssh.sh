#!/bin/sh
# `ssh [OPTIONS] -- HOST COMMAND` of a test's host: whoever serves CALLS runs the command on the other one, with these
# streams, until it ends.
for words; do :; done
call=$(mktemp -d CALLS.XXXXXX)
mkfifo "$call/in" "$call/out" "$call/err"
printf '%s\n' "$words" >"$call/words"
echo "$call" >CALLS
exec 3<&0
cat <&3 >"$call/in" &
input=$!
cat "$call/out" &
out=$!
cat "$call/err" >&2 &
wait $out $!
kill $input 2>/dev/null
rm -r "$call"
