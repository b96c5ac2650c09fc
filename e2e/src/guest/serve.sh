# Serves the lab's commands, on descriptor 3.
#
# A request is a line `ID BASE64`, the command in base64, with `+ BASE64` lines before it if it is
# long; each line is acknowledged by a `!`. Every command runs at once, in a session of its own, its
# output in /run/lab/ID.out. When it has ended a line `ID STATUS LENGTH BASE64` goes back; of an
# output above 1 MiB the text is left out and only the length told.
serve() {
    job=/run/lab/$1
    printf %s "$2" | base64 -d >"$job.sh"
    setsid sh "$job.sh" </dev/null >"$job.out" 2>&1 3>&- 4>&- &
    echo $! >"$job.pid"
    wait $!
    echo "$1 $?" >&4
}

# One process writes all replies, so they do not mix.
reply() {
    while read -r id status <&4; do
        job=/run/lab/$id
        len=$(wc -c <"$job.out")
        printf '%s %s %s ' "$id" "$status" "$len" >&3
        [ "$len" -le 1048576 ] && base64 -w 0 "$job.out" >&3
        echo >&3
        rm -f "$job.sh" "$job.out" "$job.pid"
    done
}

mkfifo /run/lab/done
exec 4<>/run/lab/done
echo "0 0 0 " >&3
reply &
text=
while :; do
    while read -r id code <&3; do
        printf '!' >&3
        if [ "$id" = + ]; then
            text=$text$code
        else
            serve "$id" "$text$code" &
            text=
        fi
    done
    # The host's end is not there (yet).
    sleep 0.1
done
