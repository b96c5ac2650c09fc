//! What is allowed works as without a sandbox.

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::sync::atomic::Ordering;
use std::time::Duration;

use vnplug_testing::eventually;

use crate::support::{Port, Running, figure, free_port, often, open_dir, said, sandboxed};

#[test]
fn a_connection_is_made_where_it_is_allowed_and_refused_elsewhere() {
    let (good, bad) = (Port::new(), Port::new());
    let allowed = good.name();
    let (to_good, to_bad) = (good.name(), bad.name());
    assert_eq!(
        said(&mut sandboxed(&[&allowed], &["connect", &to_good])),
        "done"
    );
    assert_eq!(
        said(&mut sandboxed(&[&allowed], &["connect", &to_bad])),
        "EACCES"
    );
    let nowhere = format!("127.0.0.1:{}", free_port());
    let refused = said(&mut sandboxed(&[&nowhere], &["connect", &nowhere]));
    assert_eq!(refused, "ECONNREFUSED");
    assert_eq!((good.arrived(), bad.arrived()), (1, 0));
}

#[test]
fn the_exit_code_and_the_signal_of_the_program_are_passed_on() {
    let shell = |text: &str| {
        let mut command = crate::support::as_nobody(&["run", "--", "/bin/sh", "-c", text]);
        command.status().unwrap().code()
    };
    assert_eq!(shell("exit 7"), Some(7));
    assert_eq!(shell("kill -TERM $$"), Some(128 + 15));
    let mut missing = crate::support::as_nobody(&["run", "--", "/nowhere/program"]);
    assert_eq!(
        missing
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap()
            .code(),
        Some(127)
    );
}

#[test]
fn a_server_takes_connections_and_each_is_judged() {
    let port = free_port();
    let (name, number) = (format!("127.0.0.1:{port}"), port.to_string());
    let server = Running::start(&mut sandboxed(&[&name, "accept"], &["serve", &number]));
    eventually("it listens", || server.text().contains("listens"));
    let mut stream = TcpStream::connect(&name).unwrap();
    stream.write_all(b"hello").unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"hello");
    let own = stream.local_addr().unwrap();
    eventually("it names its peer", || {
        server.text().contains(&format!("peer {own}"))
    });

    let port = free_port();
    let (name, number) = (format!("127.0.0.1:{port}"), port.to_string());
    let server = Running::start(&mut sandboxed(&[&name], &["serve", &number]));
    eventually("it listens", || server.text().contains("listens"));
    let mut stream = TcpStream::connect(&name).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let refused = stream.read(&mut answer);
    assert!(
        matches!(refused, Ok(0)) || refused.is_err_and(|error| error.raw_os_error() == Some(104))
    );
    assert!(!server.text().contains("peer"), "{}", server.text());
}

#[test]
fn a_port_that_was_not_allowed_cannot_be_bound() {
    let port = free_port().to_string();
    let mut command = sandboxed(&[], &["serve", &port]);
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("PermissionDenied"), "{error}");
}

#[test]
fn descriptors_and_long_streams_go_through_sendmsg_unchanged() {
    assert_eq!(said(&mut sandboxed(&[], &["pass"])), "by the pipe");
    assert_eq!(
        said(&mut sandboxed(&[], &["stream"])),
        "sent Ok(5000000) same true"
    );
}

#[test]
fn a_reader_that_never_reads_holds_up_its_writer_alone() {
    let dir = open_dir("sandbox-flood");
    let (path, port) = (dir.path("socket"), Port::new());
    let words = ["flood", path.to_str().unwrap(), &port.number.to_string()];
    let text = said(&mut sandboxed(&[&port.name()], &words));
    println!("{text}");
    assert!(text.contains("writer_returned=false"), "{text}");
    // Without waiting it is microseconds; the writer would hold it up for ever.
    assert!(figure(&text, "longest_us") < 200_000, "{text}");
}

#[test]
fn signals_neither_lose_nor_repeat_what_a_call_does() {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    let address = socket.local_addr().unwrap();
    let count = often(5000, 50_000);
    let words = ["signals", &address.port().to_string(), &count.to_string()];
    let mut running = Running::start(&mut sandboxed(&[&address.to_string()], &words));
    let mut next = 0;
    let mut bytes = [0; 64];
    while next < count {
        let length = socket
            .recv(&mut bytes)
            .unwrap_or_else(|error| panic!("{error}: {next} of {count} came; {}", running.text()));
        assert_eq!(length, 8);
        let number = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(number, next, "a datagram came twice or was lost");
        next += 1;
    }
    assert!(running.child.wait().unwrap().success());
    eventually("it says how it was", || running.text().contains("signals="));
    println!("{}", running.text());
    assert!(
        figure(&running.text(), "signals") > 100,
        "{}",
        running.text()
    );

    // A call that waits is made again after each signal.
    let port = free_port();
    let (name, number) = (format!("127.0.0.1:{port}"), port.to_string());
    let mut waiting = Running::start(&mut sandboxed(&[&name, "accept"], &["waits", &number]));
    eventually("it listens", || waiting.text().contains("listens"));
    std::thread::sleep(Duration::from_millis(500));
    drop(TcpStream::connect(&name).unwrap());
    assert!(waiting.child.wait().unwrap().success());
    eventually("it says how it was", || waiting.text().contains("accept="));
    assert!(waiting.text().contains("accept=done"), "{}", waiting.text());
    println!("{}", waiting.text());
}

#[test]
fn a_port_is_free_again_as_soon_as_the_program_has_closed_it() {
    let port = free_port().to_string();
    // Each of them binds to the port that the one before has left.
    let words = ["price", "bind", &port, "5000"];
    let ns = said(&mut sandboxed(&["bind"], &words));
    println!("{ns} ns");
    assert!(ns.parse::<u64>().is_ok(), "{ns}");
}

#[test]
fn a_supervisor_whose_program_has_ended_rests() {
    let text = said(&mut sandboxed(&["lingers"], &["channel"]));
    // A thread that asks the kernel again and again had 300 of them.
    assert!(figure(&text, "cpu_ms") < 150, "{text}");
}

#[test]
fn a_thousand_threads_at_once_are_all_served() {
    let port = Port::new();
    let threads = often(300, 1000).to_string();
    let words = ["threads", &port.number.to_string(), &threads, "5"];
    let text = said(&mut sandboxed(&[&port.name()], &words));
    println!("{text}");
    assert_eq!(figure(&text, "calls"), threads.parse::<u64>().unwrap() * 5);
    assert_eq!(port.datagrams.load(Ordering::Relaxed), 0);
}
