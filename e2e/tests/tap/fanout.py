"""Reads an interface by one packet socket per receive queue (PACKET_FANOUT_QM), as Suricata does.

    fanout.py INTERFACE QUEUES PACKETS

Prints one line per packet: the queue, and the UDP source port.
"""

import select
import socket
import sys

ETH_P_ALL, SOL_PACKET, PACKET_FANOUT, FANOUT_QM = 3, 263, 18, 5
# Whatever the system's limit is: who reads late loses nothing.
SO_RCVBUFFORCE = 33
interface, queues, packets = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sockets = []
for _ in range(queues):
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    s.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    s.bind((interface, ETH_P_ALL))
    s.setsockopt(SOL_PACKET, PACKET_FANOUT, FANOUT_QM << 16 | 77)
    sockets.append(s)
print("ready", flush=True)
while packets:
    readable, _, _ = select.select(sockets, [], [], 60)
    if not readable:
        sys.exit(f"{packets} packets are missing")
    for s in readable:
        frame = s.recv(2048)
        packets -= 1
        print(sockets.index(s), int.from_bytes(frame[34:36], "big"))
