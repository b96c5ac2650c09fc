"""Carries frames between near1 and wire0, so that they enter the wire as those of a network card.

TCP's own frames would bring along when they were due to be sent, and the kernel then gives every
listener a time stamp of its own (net_timestamp_check in net/core/dev.c stamps only frames without
one); two tcpdumps would differ by a microsecond.
"""
import select, socket

ends = []
for name in "near1", "wire0":
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    end.bind((name, 3))
    ends.append(end)
while True:
    for end in select.select(ends, [], [])[0]:
        frame, (_, _, kind, _, _) = end.recvfrom(65536)
        if kind != socket.PACKET_OUTGOING:
            ends[1 - ends.index(end)].send(frame)
