#!/usr/bin/env bash
# A federation whose three sites are in network namespaces of their own: `unshare -rn namespaces.sh PYTHON DIR`.
# Prints, as its last line, one JSON object: the bytes that crossed each site's only link, up and down.
# Server and sites serve metrics on one port, each in a separate network namespace; they are left in DIR.
set -e
PYTHON=$1 DIR=$2
ATOLL="$PYTHON -m atoll federate"
STARTED=()
trap 'kill "${STARTED[@]}" 2>/dev/null; wait' EXIT
ip link set lo up
ip link add br0 type bridge
ip addr add 10.9.0.1/24 dev br0
ip link set br0 up
SPACES=()
for i in 1 2 3; do
    unshare -n sleep 600 &
    SPACES[i]=$!
    STARTED+=($!)
    until [ "$(readlink /proc/${SPACES[i]}/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
    ip link add v$i type veth peer name eth0 netns ${SPACES[i]}
    ip link set v$i master br0 up
    nsenter -t ${SPACES[i]} -n sh -c "ip addr add 10.9.0.1$i/24 dev eth0; ip link set eth0 up; ip link set lo up"
done
$ATOLL split --data lagoon --clients 3 --out "$DIR/data" >&2
$ATOLL provision --site site-1 --site site-2 --site site-3 --host 10.9.0.1 --out "$DIR/kits" >&2
$ATOLL server --kit "$DIR/kits/server" --metrics 9464 >&2 &
STARTED+=($!)
for i in 1 2 3; do
    nsenter -t ${SPACES[i]} -n $ATOLL site --kit "$DIR/kits/site-$i" --data "$DIR/data/client-$i.atoll" --metrics 9464 >&2 &
    STARTED+=($!)
done
until $ATOLL status --kit "$DIR/kits/admin" 2>/dev/null | grep -c "site-. *connected" | grep -q 3; do sleep 1; done
$ATOLL run fedath --kit "$DIR/kits/admin" --rounds 10 --set hidden=256 --out "$DIR/out" >&2
GET='import sys, urllib.request as web; print(web.urlopen("http://127.0.0.1:9464/" + sys.argv[1]).read().decode())'
for page in health ready metrics; do
    $PYTHON -c "$GET" $page > "$DIR/server.$page"
    nsenter -t ${SPACES[2]} -n $PYTHON -c "$GET" $page > "$DIR/site-2.$page"
done
# At the bridge's end of a link, received is what the site sent.
awk '/v[123]:/ {split($0, n, ":"); up += $2; down += $10} END {printf "{\"up\": %d, \"down\": %d}\n", up, down}' /proc/net/dev
