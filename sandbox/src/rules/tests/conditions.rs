//! Which acts a rule is about.

use super::*;

#[test]
fn each_condition_holds_for_what_it_says_and_nothing_else() {
    for (conditions, what, known, expected) in [
        // Nothing said: every act with an address that is not on the floor.
        ("", "tcp 192.0.2.1:80", "", true),
        ("", "sctp 192.0.2.1:80", "", true),
        ("", "icmp 192.0.2.1:0", "", true),
        ("", "resolve example.org", "", true),
        ("", "tcp 127.0.0.1:80", "", false),
        ("", "raw 192.0.2.1:0", "", false),
        ("", "raw", "", false),
        ("", "unix /run/x", "", false),
        ("", "abstract x", "", false),
        ("", "listen tcp 192.0.2.1:80", "", false),
        ("", "write /etc/passwd", "", false),
        // Who.
        ("program = '/usr/bin/curl'", "tcp 192.0.2.1:80", "", true),
        ("program = '/usr/bin/*'", "tcp 192.0.2.1:80", "", true),
        ("program = '/usr/*'", "tcp 192.0.2.1:80", "", false),
        ("program = '**/curl'", "tcp 192.0.2.1:80", "", true),
        ("program = '/usr/bin/wget'", "tcp 192.0.2.1:80", "", false),
        (
            "sha256 = 'abababababababababababababababababababababababababababababababab'",
            "tcp 192.0.2.1:80",
            "",
            true,
        ),
        (
            "sha256 = 'ababababababababababababababababababababababababababababababab00'",
            "tcp 192.0.2.1:80",
            "",
            false,
        ),
        ("arguments = 'curl -v *'", "tcp 192.0.2.1:80", "", true),
        ("arguments = 'curl'", "tcp 192.0.2.1:80", "", false),
        ("parent = '/usr/bin/make'", "tcp 192.0.2.1:80", "", true),
        ("parent = '/usr/bin/curl'", "tcp 192.0.2.1:80", "", false),
        // Protocol.
        ("protocol = 'tcp'", "tcp 192.0.2.1:80", "", true),
        ("protocol = ['tcp', 'udp']", "udp 192.0.2.1:80", "", true),
        ("protocol = 'udp'", "tcp 192.0.2.1:80", "", false),
        ("protocol = 'udp'", "resolve example.org", "", true),
        ("protocol = 'ip:132'", "sctp 192.0.2.1:80", "", true),
        ("protocol = 'raw'", "raw", "", true),
        ("protocol = 'raw'", "raw 192.0.2.1:0", "", true),
        ("protocol = 'raw'", "raw 10.0.0.1:0", "", false),
        ("protocol = 'raw'; to = '192.0.2.1'", "raw", "", true),
        (
            "protocol = 'raw'; to = '192.0.2.1'",
            "raw 192.0.2.2:0",
            "",
            false,
        ),
        ("protocol = 'netlink'", "netlink", "", true),
        ("protocol = 'netlink:16'", "netlink", "", true),
        ("protocol = 'netlink:0'", "netlink", "", false),
        ("protocol = 'packet'", "packet", "", true),
        ("protocol = 'unix'", "unix /run/x", "", true),
        ("protocol = 'unix'", "abstract x", "", true),
        ("protocol = 'unix'", "resolve example.org", "", false),
        // Addresses.
        ("to = '192.0.2.1'", "tcp 192.0.2.1:80", "", true),
        ("to = '192.0.2.1'", "tcp [::ffff:192.0.2.1]:80", "", true),
        ("to = '192.0.2.0/24'", "tcp 192.0.2.255:80", "", true),
        ("to = '192.0.2.0/24'", "tcp 192.0.3.0:80", "", false),
        ("to = '0.0.0.0/0'", "tcp 192.0.2.1:80", "", true),
        ("to = '0.0.0.0/0'", "tcp [2001:db8::1]:80", "", false),
        ("to = '192.0.2.1'", "resolve example.org", "", false),
        ("to = '192.0.2.1'", "tcp 192.0.2.2:80", "example.org", false),
        // Ports.
        ("port = 80", "tcp 192.0.2.1:80", "", true),
        ("port = [79, '80-90']", "tcp 192.0.2.1:81", "", true),
        ("port = 443", "tcp 192.0.2.1:80", "", false),
        ("port = 443", "resolve example.org", "", true),
        // Names.
        ("to = 'example.org'", "resolve example.org", "", true),
        ("to = 'example.org'", "resolve EXAMPLE.org.", "", true),
        ("to = 'example.org'", "resolve www.example.org", "", false),
        ("to = '*.example.org'", "resolve www.example.org", "", true),
        ("to = '*.example.org'", "resolve example.org", "", false),
        ("to = '*.example.org'", "resolve evilexample.org", "", false),
        (
            "to = 'example.org'",
            "tcp 192.0.2.1:80",
            "example.org",
            true,
        ),
        (
            "to = 'example.org'",
            "tcp 192.0.2.1:80",
            "other.org example.org",
            true,
        ),
        ("to = 'example.org'", "tcp 192.0.2.1:80", "", false),
        ("to = 'example.org'", "tcp 192.0.2.1:80", "other.org", false),
        // The floor.
        ("to = 'any'", "tcp 10.0.0.1:80", "", false),
        ("to = '0.0.0.0/0'", "tcp 10.0.0.1:80", "", false),
        ("to = '10.0.0.0/8'", "tcp 10.0.0.1:80", "", true),
        ("to = '169.254.0.0/16'", "tcp 169.254.169.254:80", "", true),
        ("to = 'private'", "tcp 10.0.0.1:80", "", true),
        ("to = 'private'", "tcp 127.0.0.1:80", "", false),
        ("to = 'link-local'", "tcp 169.254.169.254:80", "", false),
        ("to = 'metadata'", "tcp 169.254.169.254:80", "", true),
        (
            "to = 'example.org'",
            "tcp 10.0.0.1:80",
            "example.org",
            false,
        ),
        (
            "to = 'example.org'; local = true",
            "tcp 10.0.0.1:80",
            "example.org",
            true,
        ),
        (
            "to = 'example.org'; local = true",
            "tcp 10.0.0.1:80",
            "",
            false,
        ),
        // Listening and accepting.
        ("direction = 'listen'", "listen tcp 0.0.0.0:80", "", true),
        (
            "direction = 'listen'; to = 'loopback'",
            "listen tcp 127.0.0.1:80",
            "",
            true,
        ),
        (
            "direction = 'listen'; to = 'loopback'",
            "listen tcp 192.0.2.1:80",
            "",
            false,
        ),
        (
            "direction = 'listen'; port = '1024-65535'",
            "listen udp 0.0.0.0:53",
            "",
            false,
        ),
        (
            "direction = 'accept'; to = 'private'",
            "accept tcp 10.0.0.1:4000",
            "",
            true,
        ),
        ("direction = 'accept'", "tcp 192.0.2.1:80", "", false),
        // Other families, and files.
        ("to = 'unix:/run/*'", "unix /run/x", "", true),
        ("to = 'unix:/run/*'", "unix /run/a/x", "", false),
        ("to = 'unix:@x*'", "abstract xyz", "", true),
        ("to = 'unix:@x*'", "unix /run/x", "", false),
        ("to = 'vsock:2'", "vsock 2", "", true),
        ("to = 'vsock:3'", "vsock 2", "", false),
        ("to = 'vsock:any'; port = 6", "vsock 2", "", false),
        ("direction = 'write'", "write /etc/passwd", "", true),
        (
            "direction = 'write'; to = 'file:/tmp/**'",
            "write /tmp/a/b",
            "",
            true,
        ),
        (
            "direction = 'write'; to = 'file:/tmp/**'",
            "write /etc/passwd",
            "",
            false,
        ),
        ("direction = 'execute'", "write /etc/passwd", "", false),
        // Until.
        ("until = 2030-01-01T00:00:00Z", "tcp 192.0.2.1:80", "", true),
        (
            "until = 2020-01-01T00:00:00Z",
            "tcp 192.0.2.1:80",
            "",
            false,
        ),
    ] {
        assert_eq!(
            is_about(conditions, what, known),
            expected,
            "{conditions} | {what} | {known}"
        );
    }
}

#[test]
fn a_rule_that_refuses_some_port_does_not_refuse_the_name() {
    let deny = |more: &str, what: &str| {
        rules(&format!(
            "[[rule]]\nsay = 'deny'\nto = 'example.org'\n{more}"
        ))[0]
            .matches(&act(what), &[], now())
    };
    assert!(deny("", "resolve example.org"));
    assert!(!deny("port = 25", "resolve example.org"));
    assert!(!deny("protocol = 'udp'", "resolve example.org"));
    let raw = rules("[[rule]]\nsay = 'deny'\nprotocol = 'raw'\nto = '192.0.2.1'\n");
    assert!(!raw[0].matches(&act("raw"), &[], now()));
    // What refuses need not name the floor.
    assert!(rules("[[rule]]\nsay = 'deny'\n")[0].matches(&act("tcp 10.0.0.1:1"), &[], now()));
}
