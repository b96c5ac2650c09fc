"""The far end: HTTP, TLS and SIP servers on all its addresses, until it is killed.

argv: directory with cert.pem and key.pem, IPv4 address. DNS and DHCP are dnsmasq's.
"""
import http.server, os, socket, socketserver, ssl, sys, threading

home, address = sys.argv[1:]


class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "far/1", ""

    def do_GET(self):
        body = b"A page of the far end: " + self.path.encode() + b"\n" + b"x" * 3000 + b"\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Pages(socketserver.ThreadingMixIn, http.server.HTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True

    def server_bind(self):
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "far", self.server_address[1]


def phone():
    sip = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sip.bind((address, 5060))
    while True:
        request, peer = sip.recvfrom(4000)
        kept = [
            line
            for line in request.decode().split("\r\n")
            if line.split(":")[0] in ("Via", "From", "To", "Call-ID", "CSeq")
        ]
        answer = ["SIP/2.0 200 OK", *kept, "Content-Length: 0", "", ""]
        sip.sendto("\r\n".join(answer).encode(), peer)


def sink():
    """Takes the last packet of a conversation, so that no error follows it."""
    last = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    last.bind((address, 9))
    while True:
        last.recv(4000)


plain, secret = Pages(("::", 80), Page), Pages(("::", 443), Page)
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(os.path.join(home, "cert.pem"), os.path.join(home, "key.pem"))
secret.socket = tls.wrap_socket(secret.socket, server_side=True)
for serve in plain.serve_forever, secret.serve_forever, phone, sink:
    threading.Thread(target=serve, daemon=True).start()
threading.Event().wait()
