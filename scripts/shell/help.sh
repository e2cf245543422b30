# Sourced first by scripts that are bash: --help prints the comment that the called script begins with.
case "${1:-}" in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
