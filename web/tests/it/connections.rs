//! Clients that hold connections and say nothing, or little.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::support::*;

#[test]
fn silent_and_slow_clients_do_not_shut_the_page() {
    let place = TestDir::new("web");
    segment(&place.0, 0, [(START, &udp(1, 60)[..])]);
    let server = Server::start(&[&place.0]);
    let host = server.address.to_string();
    let connect = |says: &str| {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(says.as_bytes()).unwrap();
        stream
    };
    let ask = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
    // As many as are held, each kept alive, and twice as many that begin a request.
    let _kept: Vec<_> = (0..128).map(|_| connect(&ask)).collect();
    let mut slow: Vec<_> = (0..257).map(|_| connect("GET / HTTP/1.1\r\nX-")).collect();
    for _ in 0..3 {
        for stream in &mut slow {
            // Those that were cut are no longer heard.
            let _ = stream.write_all(b"a");
        }
        let began = Instant::now();
        assert_eq!(server.get("/").status, 200);
        // 385 connections are let in, 128 in 0.2 s.
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "{:?}",
            began.elapsed()
        );
    }
}
