#!/usr/bin/env bash
# Makes, activates and removes a swap file for the stack, which has limits of 4 GB of memory and 12 GB
# of swap. The script needs only coreutils and util-linux.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: sudo ./swap-setup.sh [OPTION…]

  --size SIZE        size of the swap file, as 12G or 512M (default: 12G; env SWAP_SIZE)
  --path FILE        where it is (default: swapfile-specops in the root folder, or on the disk
                     with the most room where the root cannot hold swap; env SWAP_PATH)
  --swappiness N     also set vm.swappiness, 0 to 200 (default: leave it; env SWAP_SWAPPINESS)
  --persist          also after a reboot: an entry in /etc/fstab (and in /etc/sysctl.d)
  --status           show what there is, change nothing
  --remove           switch the file off, delete it and what --persist wrote
  --dry-run          show what would be done, change nothing
  --help             this text

Doing it twice changes nothing, and without --path so does a machine that has as much swap already.
Exit status: 0 done, 1 failed, 2 wrong use, 3 this machine or container refuses swap (the stack fits
into 4 GB without it), 4 not enough room on the disk.
EOF
}

readonly REFUSED=3 NO_ROOM=4
readonly KEEP_FREE=$((1 << 30)) # bytes that stay free on the file's disk
readonly FILE_NAME=swapfile-specops
readonly HOLD_SWAP=(ext2 ext3 ext4 xfs btrfs f2fs) # file systems that can hold swap files
readonly MARK="# specops swap"
readonly SYSCTL_FILE=/etc/sysctl.d/60-specops-swap.conf

fstab=${SWAP_FSTAB:-/etc/fstab} # another one for tests
size_text=${SWAP_SIZE:-12G}
path=${SWAP_PATH:-} # empty: found or chosen, see choose_path
swappiness=${SWAP_SWAPPINESS:-}
action=add
named=0 # whether the user gave the path
persist=0
dry_run=0

say() { printf '%s\n' "$*"; }
fail() { # STATUS MESSAGE…
    local status=$1
    shift
    printf 'swap-setup: %s\n' "$*" >&2
    exit "$status"
}
run() { # COMMAND…: runs it, or shows it with --dry-run
    if ((dry_run)); then say "would run: $*"; else "$@"; fi
}
human() { numfmt --to=iec --format=%.1f "$1"; }

refuse() { # WHY
    fail "$REFUSED" "$1. No swap here, then; the stack is made to fit into 4 GB without it."
}

parse_arguments() {
    while (($#)); do
        case $1 in
            --size | --path | --swappiness)
                (($# > 1)) || fail 2 "$1 takes a value"
                case $1 in
                    --size) size_text=$2 ;;
                    --path) path=$2 ;;
                    --swappiness) swappiness=$2 ;;
                esac
                shift
                ;;
            --persist) persist=1 ;;
            --status) action=status ;;
            --remove) action=remove ;;
            --dry-run) dry_run=1 ;;
            --help | -h)
                usage
                exit 0
                ;;
            *) fail 2 "unknown option $1; --help lists them" ;;
        esac
        shift
    done
    if ! size=$(numfmt --from=iec "$size_text" 2>/dev/null) || ((size < 1 << 20)); then
        fail 2 "--size takes 12G or 512M, at least 1M, not $size_text"
    fi
    size=$((size >> 20 << 20)) # whole MiB
    if [[ -n $path && ($path != /* || $path == *[[:space:]]*) ]]; then
        fail 2 "--path takes a full path without blanks, not $path"
    fi
    if [[ ! $swappiness =~ ^(|[0-9]{1,3})$ ]] || ((swappiness > 200)); then
        fail 2 "--swappiness takes 0 to 200, not $swappiness"
    fi
}

need_root() {
    if ! ((dry_run)) && ((EUID != 0)); then fail 1 "changing swap takes root: sudo $0 …"; fi
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

choose_path() { # sets: path, to an existing swap file of ours or to the place for a new one
    if [[ -n $path ]]; then
        named=1
        return
    fi
    local found folder
    found=$(awk -v name="/$FILE_NAME" \
        'substr($1, length($1) - length(name) + 1) == name { print $1; exit }' \
        /proc/swaps "$fstab" 2>/dev/null || true)
    while [[ -z $found ]] && read -r _ folder; do
        if [[ -e $folder$FILE_NAME ]]; then found=$folder$FILE_NAME; fi
    done < <(disks)
    if [[ -z $found ]] && ! disks | grep ' /$' >/dev/null; then # no disk at /: in a container, for example
        folder=$(disks | awk 'NR == 1 { print $2 }')
        if [[ -n $folder ]]; then found=$folder$FILE_NAME; fi
    fi
    path=${found:-/$FILE_NAME}
}

active() { awk -v path="$path" '$1 == path { found = 1 } END { exit !found }' /proc/swaps; }

other_swap() { # bytes of the machine's other swap
    awk -v path="$path" \
        'NR > 1 && $1 != path { kib += $3 } END { printf "%.0f", kib * 1024 }' /proc/swaps
}

is_swap_file() { # the signature stands at the end of the first page
    local page
    page=$(getconf PAGE_SIZE)
    [[ $(head -c "$page" -- "$path" | tail -c 10 | tr -d '\0') == SWAPSPACE2 ]]
}

meminfo() { # FIELD: bytes
    awk -v field="$1:" '$1 == field { printf "%.0f", $2 * 1024 }' /proc/meminfo
}

show_status() {
    say "Memory:      $(human "$(meminfo MemTotal)")"
    say "Swap:        $(human "$(meminfo SwapTotal)"), of it free $(human "$(meminfo SwapFree)")"
    say "Swappiness:  $(cat /proc/sys/vm/swappiness)"
    if active; then
        say "$path: active, $(human "$(stat -c %s -- "$path")")"
    elif [[ -e $path ]]; then
        say "$path: there, not active"
    else
        say "$path: not there"
    fi
    if grep -qsF "$MARK" "$fstab"; then
        say "After a reboot: yes, $fstab has it"
    else
        say "After a reboot: no"
    fi
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
            "$(human "$KEEP_FREE") to spare are needed. --size or --path choose otherwise."
    fi
}

make_file() {
    run rm -f -- "$path"
    if ((dry_run)); then
        say "would make: $path, $(human "$size"), for root alone"
        return
    fi
    (umask 077 && : >"$path")
    if [[ $file_system == btrfs ]]; then # no copy-on-write and no compression below swap
        chattr +C -- "$path" || refuse "$path cannot be taken out of btrfs' copy-on-write"
    fi
    # fallocate takes no time. If it is not supported, or leaves holes that swapon refuses (old
    # kernels on xfs), dd writes the blocks.
    if [[ $file_system == xfs ]] || ! fallocate -l "$size" -- "$path" 2>/dev/null; then
        dd if=/dev/zero of="$path" bs=1M count=$((size / (1 << 20))) conv=fsync status=none
    fi
    mkswap -- "$path" >/dev/null
}

activate() {
    local words
    if ((dry_run)); then
        run swapon -- "$path"
    elif ! words=$(swapon -- "$path" 2>&1); then
        rm -f -- "$path"
        refuse "swapon was refused (${words##*: })"
    fi
}

switch_off() {
    if active && ! run swapoff -- "$path"; then
        fail 1 "$path cannot be switched off: too little free memory to take back what it holds"
    fi
}

set_swappiness() {
    if [[ -z $swappiness || $(cat /proc/sys/vm/swappiness) == "$swappiness" ]]; then return; fi
    run sysctl -q -w "vm.swappiness=$swappiness" || fail 1 "vm.swappiness cannot be set here"
}

persist_it() {
    if ((dry_run)); then
        say "would add to $fstab: $path none swap sw 0 0 $MARK"
        return
    fi
    forget_it
    printf '%s none swap sw 0 0 %s\n' "$path" "$MARK" >>"$fstab"
    if [[ -n $swappiness ]]; then printf 'vm.swappiness = %s\n' "$swappiness" >"$SYSCTL_FILE"; fi
}

forget_it() {
    if grep -qsF "$MARK" "$fstab"; then run sed -i "/$MARK\$/d" "$fstab"; fi
    if [[ -e $SYSCTL_FILE ]]; then run rm -f -- "$SYSCTL_FILE"; fi
}

add_swap() {
    need_root
    if active && (($(stat -c %s -- "$path") == size)); then
        say "$path is active already, $(human "$size")."
    elif ! ((named)) && ! active && (($(other_swap) >= size)); then
        say "This machine has $(human "$(other_swap)") of swap already: nothing to add."
        set_swappiness
        return
    else
        if [[ -e $path ]] && ! is_swap_file; then
            fail 1 "$path exists and is not a swap file: not touched. --path names another."
        fi
        check_file_system
        check_room
        switch_off
        make_file
        activate
        ((dry_run)) || say "$path is active, $(human "$size")."
    fi
    set_swappiness
    if ((persist)); then persist_it; fi
}

remove_swap() {
    need_root
    switch_off
    if [[ -e $path ]]; then
        is_swap_file || fail 1 "$path is not a swap file: not touched"
        run rm -f -- "$path"
    fi
    forget_it
    ((dry_run)) || say "$path is gone."
}

parse_arguments "$@"
choose_path
case $action in
    status) show_status ;;
    remove) remove_swap ;;
    add) add_swap ;;
esac
