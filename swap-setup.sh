#!/usr/bin/env bash
# Makes, activates and removes a swap file for the stack, whose limits are 4 GB of memory and 12 GB of
# swap. The script needs only coreutils, util-linux, grep and awk.
set -euo pipefail
export LC_ALL=C # for decimal points in numbers

usage() {
    cat <<'EOF'
Usage: sudo ./swap-setup.sh [OPTION…]

  --size SIZE        size of the swap file, such as 12G or 512M (default: 12G; env SWAP_SIZE)
  --path FILE        the swap file (default: the file that this script made before; otherwise
                     swapfile-specops in the root folder or, if that cannot hold swap, on the
                     disk with the most room; env SWAP_PATH)
  --swappiness N     also set vm.swappiness, 0 to 200 (default: leave it; env SWAP_SWAPPINESS)
  --persist          keep the swap after a reboot: add it to /etc/fstab (and /etc/sysctl.d)
  --status           show the machine's swap, change nothing
  --remove           switch the file off, delete it and undo --persist; without --path for
                     every file that this script made
  --dry-run          show what would be done, change nothing
  --help             show this text

A second run changes nothing; without --path, nor does a first run where there is as much swap already.
Exit status: 0 done, 1 failed, 2 wrong use, 3 this machine or container refuses swap (the stack fits
into 4 GB without it), 4 not enough room on the disk.
EOF
}

readonly REFUSED=3 NO_ROOM=4
readonly KEEP_FREE=$((1 << 30)) # bytes that stay free on the file's disk
readonly FILE_NAME=swapfile-specops
readonly HOLD_SWAP=(ext2 ext3 ext4 xfs btrfs f2fs) # file systems that can hold swap files
readonly MARK="# specops swap" # ends a line of fstab
readonly LABEL=specops        # in the header of our swap files
readonly PROBE=$((1 << 20))   # bytes of the file that tests whether swap is allowed

fstab=${SWAP_FSTAB:-/etc/fstab} # another one for tests
sysctl_file=$(dirname -- "$fstab")/sysctl.d/60-specops-swap.conf
size_text=${SWAP_SIZE:-12G}
path=${SWAP_PATH:-} # empty: found or chosen, see choose_path
swappiness=${SWAP_SWAPPINESS:-}
action=
named=0  # whether the user gave the path
found=() # the swap files that this script made; with a path, only that one
persist=0
dry_run=0

say() { printf '%s\n' "$*"; }
fail() { # STATUS MESSAGE…
    local status=$1
    shift
    printf 'swap-setup: %s\n' "$*" >&2
    exit "$status"
}
run() { # COMMAND…: runs it; with --dry-run, shows it
    if ((dry_run)); then say "would run: $*"; else "$@"; fi
}
human() { numfmt --to=iec --format=%.1f "$1"; }

refuse() { # WHY
    fail "$REFUSED" "$1. This machine gets no swap; the stack fits into 4 GB without it."
}
act() { # ACTION: the requested one
    [[ -z $action || $action == "$1" ]] || fail 2 "--$action and --$1 exclude each other"
    action=$1
}

parse_arguments() {
    while (($#)); do
        case $1 in
            --size | --path | --swappiness)
                [[ -n ${2:-} ]] || fail 2 "$1 needs a value"
                case $1 in
                    --size) size_text=$2 ;;
                    --path) path=$2 ;;
                    --swappiness) swappiness=$2 ;;
                esac
                shift
                ;;
            --persist) persist=1 ;;
            --status) act status ;;
            --remove) act remove ;;
            --dry-run) dry_run=1 ;;
            --help | -h)
                usage
                exit 0
                ;;
            *) fail 2 "unknown option $1; --help lists them" ;;
        esac
        shift
    done
    if [[ ! $size_text =~ ^[0-9]{1,7}(\.[0-9]{1,3})?[KMGT]$ ]] ||
        ! size=$(numfmt --from=iec "$size_text") || ((size < 1 << 20)); then
        fail 2 "--size must be like 12G or 512M, at least 1M, not '$size_text'"
    fi
    size=$((size >> 20 << 20)) # whole MiB
    if [[ ! $swappiness =~ ^(|0|[1-9][0-9]{0,2})$ ]] || ((swappiness > 200)); then
        fail 2 "--swappiness must be 0 to 200, not '$swappiness'"
    fi
    if [[ -n $path ]]; then
        if [[ $path != /* || $path == */ || $path == *[[:space:]\\]* ]]; then
            fail 2 "--path must be the full path of a file, without blanks, not '$path'"
        fi
        path=$(realpath --canonicalize-missing -- "$path") # as in /proc/swaps
        named=1
    fi
    if [[ $action == remove ]] && ((persist)); then
        fail 2 "--remove and --persist exclude each other"
    fi
}

need_root() {
    if ! ((dry_run)) && ((EUID != 0)); then fail 1 "changing swap needs root: sudo $0 …"; fi
}

disks() { # lines "BYTES FOLDER": writable disks that can hold swap, the most room first
    local folder available
    df --local --output=avail,target -B1 "${HOLD_SWAP[@]/#/--type=}" 2>/dev/null | tail -n +2 |
        sort -rn | while read -r available folder; do
        if [[ -d $folder && -w $folder && $folder != *[[:space:]]* ]]; then
            printf '%s %s\n' "$available" "${folder%/}/"
        fi
    done
}

ours() { # the files that this script made: in fstab, active, or on a disk under its name
    awk -v mark="$MARK" -v name="/$FILE_NAME\$" 'index($0, mark) || $1 ~ name { print $1 }' \
        "$fstab" 2>/dev/null || true
    local file folder
    while read -r file _; do
        if [[ ${file##*/} == "$FILE_NAME" || $(header "$file" 1052 16) == "$LABEL" ]]; then
            printf '%s\n' "$file"
        fi
    done < <(tail -n +2 /proc/swaps)
    while read -r _ folder; do
        if [[ -e $folder$FILE_NAME ]]; then printf '%s\n' "$folder$FILE_NAME"; fi
    done < <(disks)
}

choose_path() { # sets: found, and path to the first of them or to the place for a new one
    if ((named)); then
        found=("$path")
        return
    fi
    mapfile -t found < <(ours | awk '!seen[$0]++')
    path=${found[0]:-}
    if [[ -z $path ]] && ! disks | grep ' /$' >/dev/null; then # no disk at /, as in a container
        path=$(disks | awk -v name="$FILE_NAME" 'NR == 1 { print $2 name }')
    fi
    path=${path:-/$FILE_NAME}
}

active() { awk -v path="$path" '$1 == path { found = 1 } END { exit !found }' /proc/swaps; }

other_swap() { # bytes of the machine's other swap
    awk -v path="$path" \
        'NR > 1 && $1 != path { kib += $3 } END { printf "%.0f", kib * 1024 }' /proc/swaps
}

header() { # FILE FIRST COUNT: that many bytes of the file, without zeros
    { head -c $(($2 + $3)) -- "$1" | tail -c "$3" | tr -d '\0'; } 2>/dev/null || true
}

require_swap_file() { # ends the script if something else is at $path
    [[ -e $path ]] || return 0
    if [[ -f $path && ! -r $path ]]; then fail 1 "reading $path needs root: sudo $0 …"; fi
    # The signature is at the end of the first page.
    if [[ ! -f $path || $(header "$path" $(($(getconf PAGE_SIZE) - 10)) 10) != SWAPSPACE2 ]]; then
        fail 1 "$path exists and is not a swap file: not touched. Choose another with --path."
    fi
}

meminfo() { # FIELD: bytes
    awk -v field="$1:" '$1 == field { printf "%.0f", $2 * 1024 }' /proc/meminfo
}

show_status() {
    say "Memory:      $(human "$(meminfo MemTotal)")"
    say "Swap:        $(human "$(meminfo SwapTotal)"), $(human "$(meminfo SwapFree)") of it free"
    say "Swappiness:  $(cat /proc/sys/vm/swappiness)"
    for path in "${found[@]:-$path}"; do
        if active; then
            say "$path: active, $(human "$(stat -c %s -- "$path")")"
        elif [[ -e $path ]]; then
            say "$path: exists, not active"
        else
            say "$path: does not exist"
        fi
        if in_fstab; then
            say "After a reboot: yes, it is in $fstab"
        else
            say "After a reboot: no"
        fi
    done
}

check_file_system() { # sets: file_system
    local folder
    folder=$(dirname -- "$path")
    [[ -d $folder ]] || fail 1 "there is no folder $folder"
    file_system=$(stat -f -c %T -- "$folder")
    case $file_system in
        overlayfs | tmpfs | ramfs | zfs | nfs* | cifs | smb* | fuse* | v9fs | squashfs | aufs)
            refuse "$folder is on $file_system, which cannot hold a swap file"
            ;;
    esac
}

check_room() {
    local folder available reusable=0
    folder=$(dirname -- "$path")
    available=$(df --output=avail -B1 -- "$folder" | tail -n 1)
    if [[ -e $path ]]; then reusable=$(($(stat -c %b -- "$path") * 512)); fi
    if ((available + reusable < size + KEEP_FREE)); then
        fail "$NO_ROOM" "$folder has $(human "$available") free; $(human "$size") of swap and" \
            "$(human "$KEEP_FREE") to spare are needed. Change --size or --path."
    fi
}

make_file() { # BYTES: makes a swap file named like the path with .partial after it
    (umask 077 && : >"$path.partial")
    if [[ $file_system == btrfs ]]; then # no copy-on-write and no compression below swap
        chattr +C -- "$path.partial" || refuse "$path cannot be taken out of btrfs' copy-on-write"
    fi
    # fallocate takes no time. If it is not supported, or leaves holes that swapon refuses (old
    # kernels on xfs), dd writes the blocks.
    if [[ $file_system == xfs ]] || ! fallocate -l "$1" -- "$path.partial" 2>/dev/null; then
        dd if=/dev/zero of="$path.partial" bs=1M count=$(($1 >> 20)) conv=fsync status=none
    fi
    mkswap --label "$LABEL" -- "$path.partial" >/dev/null
}

swap_on() { # FILE: if the machine refuses, deletes the file and ends the script
    local words
    if ! words=$(swapon -- "$1" 2>&1); then
        rm -f -- "$1"
        refuse "swapon was refused (${words##*: })"
    fi
}

activate() {
    if ((dry_run)); then
        switch_off
        say "would make: $path, $(human "$size"), readable by root only"
        say "would run: swapon -- $path"
        return
    fi
    trap 'rm -f -- "$path.partial"' EXIT
    # A small file shows whether swap is allowed, before the old file is switched off.
    make_file "$PROBE"
    swap_on "$path.partial"
    swapoff -- "$path.partial"
    switch_off
    rm -f -- "$path"
    make_file "$size"
    mv -- "$path.partial" "$path"
    swap_on "$path"
    say "$path is active, $(human "$size")."
}

switch_off() {
    if active && ! run swapoff -- "$path"; then
        fail 1 "$path cannot be switched off: its contents do not fit into free memory"
    fi
}

set_swappiness() {
    if [[ -z $swappiness || $(cat /proc/sys/vm/swappiness) == "$swappiness" ]]; then return; fi
    if ((dry_run)); then
        say "would set vm.swappiness=$swappiness"
    elif ! echo "$swappiness" 2>/dev/null >/proc/sys/vm/swappiness; then
        fail 1 "vm.swappiness cannot be set here"
    fi
}

in_fstab() {
    awk -v path="$path" '$1 == path && $3 == "swap" { found = 1 } END { exit !found }' \
        "$fstab" 2>/dev/null
}

persist_it() {
    local line="$path none swap sw 0 0 $MARK"
    if in_fstab; then
        : # it stays as it is
    elif ((dry_run)); then
        say "would add to $fstab: $line"
    else
        if [[ -s $fstab && -n $(tail -c 1 -- "$fstab") ]]; then echo >>"$fstab"; fi
        printf '%s\n' "$line" >>"$fstab"
    fi
    if [[ -z $swappiness ]]; then return; fi
    if ((dry_run)); then
        say "would write vm.swappiness=$swappiness to $sysctl_file"
    else
        mkdir -p -- "$(dirname -- "$sysctl_file")"
        printf 'vm.swappiness = %s\n' "$swappiness" >"$sysctl_file"
    fi
}

forget_it() { # removes the file's line from fstab; with the last line, also the swappiness
    local rest
    if grep -qsF "$MARK" "$fstab"; then
        rest=$(awk -v path="$path" -v mark="$MARK" '$1 != path || !index($0, mark)' "$fstab")
        if [[ $rest != "$(<"$fstab")" ]]; then
            if ((dry_run)); then
                say "would remove $path from $fstab"
            else
                printf '%s' "${rest:+$rest$'\n'}" >"$fstab"
            fi
        fi
        if grep -qF "$MARK" <<<"$rest"; then return; fi
    fi
    if [[ -e $sysctl_file ]]; then run rm -f -- "$sysctl_file"; fi
}

add_swap() {
    need_root
    if active && (($(stat -c %s -- "$path") == size)); then
        say "$path is active already, $(human "$size")."
    elif ! ((named)) && ! active && (($(other_swap) >= size)); then
        say "This machine already has $(human "$(other_swap)") of swap: nothing to add."
        set_swappiness
        return
    else
        require_swap_file
        check_file_system
        check_room
        activate
    fi
    set_swappiness
    if ((persist)); then persist_it; fi
}

remove_swap() {
    need_root
    if ! ((${#found[@]})); then say "This script has made no swap file: nothing to remove."; fi
    for path in "${found[@]}"; do
        require_swap_file
        if [[ -e $path ]]; then
            switch_off
            run rm -f -- "$path"
            ((dry_run)) || say "$path is removed."
        else
            say "$path does not exist: nothing to remove."
        fi
        forget_it
    done
}

parse_arguments "$@"
choose_path
case $action in
    status) show_status ;;
    remove) remove_swap ;;
    *) add_swap ;;
esac
