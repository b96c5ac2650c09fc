"""The near end: one short conversation of each kind, one after the other, then a last packet.

argv: the text of the last packet. Everything goes over real sockets; fails if an answer is wrong.
"""
import http.client, socket, ssl, struct, subprocess, sys

V4, V6 = "10.78.0.1", "fd78::1"


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def hang_up(web):
    """Waits for the server's end: none of its packets comes behind the last one."""
    web.sock.shutdown(socket.SHUT_WR)
    while web.sock.recv(4000):
        pass
    web.close()


def page(host):
    web = http.client.HTTPConnection(host, 80, timeout=20)
    web.request("GET", "/" + host, headers={"User-Agent": "near/1"})
    assert host.encode() in web.getresponse().read()
    hang_up(web)


def secret():
    anyone = ssl._create_unverified_context()
    web = http.client.HTTPSConnection(V4, 443, timeout=20, context=anyone)
    web.request("GET", "/secret")
    assert b"/secret" in web.getresponse().read()
    hang_up(web)


def call():
    sip = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sip.settimeout(20)
    sip.connect((V4, 5060))
    for number, method in enumerate(("INVITE", "ACK", "BYE"), 1):
        lines = [
            f"{method} sip:far@{V4} SIP/2.0",
            "Via: SIP/2.0/UDP 10.78.0.2:5060;branch=z9hG4bK1",
            "From: <sip:near@10.78.0.2>;tag=1",
            f"To: <sip:far@{V4}>",
            "Call-ID: call-1@10.78.0.2",
            f"CSeq: {number} {method}",
            "Max-Forwards: 70",
            "Content-Length: 0",
        ]
        sip.send("\r\n".join([*lines, "", ""]).encode())
        assert sip.recv(4000).startswith(b"SIP/2.0 200")


def tagged():
    """Frames with 802.1Q tags, one in QinQ: the kernel may lack VLAN interfaces, the wire does not."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    raw.bind(("wire0", 0))
    ends = bytes.fromhex("020000007801 020000007802")
    for tag in ("8100 0007", "8100 e007", "8100 0008", "88a8 0009 8100 0007"):
        data = b"tagged " + tag.encode()
        udp = struct.pack("!4H", 4000, 4001, 8 + len(data), 0) + data
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0,
                         socket.inet_aton("10.79.0.2"), socket.inet_aton("10.79.0.1"))
        raw.send(ends + bytes.fromhex(tag) + bytes.fromhex("0800") + ip + udp)


# Entries for good stay; this one is asked for again.
run("ip", "neigh", "flush", "dev", "near0")
for host in V4, V6:
    run("ping", "-q", "-c", "3", "-i", "0.02", "-W", "20", host)
for host in V4, V6:
    page(host)
for number in range(3):
    name = f"host{number}.lab"
    answer = run("dig", "+short", "+tries=3", "+time=5", "@" + V4, name)
    assert answer.strip() == "10.78.0.7", answer
call()
secret()
tagged()
run("busybox", "udhcpc", "-f", "-n", "-q", "-i", "near0", "-s", "/bin/true", "-t", "5", "-T", "2")
last = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
last.sendto(sys.argv[1].encode(), (V4, 9))
