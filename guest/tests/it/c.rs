//! A program in C, in a process of its own, against the header and both forms of the library.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use vnplug_ring::control::code;
use vnplug_ring::layout::Life;
use vnplug_testing::eventually;

use crate::support::{Dir, Server};

/// Where cargo put the library: beside this test's directory of binaries.
fn library_dir() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let dir = test.parent().unwrap();
    assert!(dir.join("libvnplug.so").exists() && dir.join("libvnplug.a").exists());
    dir.to_owned()
}

fn build(dir: &Path, source: &str, library: &[&str]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = dir.join("program");
    let status = Command::new("cc")
        .args([
            "-std=c11",
            "-D_GNU_SOURCE",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
        ])
        .arg("-I")
        .arg(root.join("include"))
        .arg(root.join(source))
        .arg("-o")
        .arg(&program)
        .args(library)
        .status()
        .unwrap();
    assert!(status.success());
    program
}

fn build_shared(dir: &Path, source: &str) -> PathBuf {
    let libraries = library_dir();
    let (search, path) = (
        format!("-L{}", libraries.display()),
        // As RPATH, which goes before LD_LIBRARY_PATH: there cargo names the directory above first,
        // whose library is of the last `cargo build`.
        format!("-Wl,--disable-new-dtags,-rpath,{}", libraries.display()),
    );
    build(dir, source, &[&search, &path, "-lvnplug"])
}

fn build_static(dir: &Path, source: &str) -> PathBuf {
    let library = library_dir().join("libvnplug.a");
    build(
        dir,
        source,
        &[library.to_str().unwrap(), "-lpthread", "-ldl", "-lm"],
    )
}

fn start(program: &Path, socket: &Path, args: &[&str]) -> Child {
    Command::new(program)
        .args(args)
        .env("VNPLUG_SOCKET", socket)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn stderr(child: &mut Child) -> String {
    let mut text = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    text
}

fn the_epoll_example_reads_to_the_end(program: &Path, dir: &Dir) {
    let server = Server::start(&dir.socket());
    let mut child = start(program, &dir.socket(), &["host:eth0", "udp"]);
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    eventually("the port is open", || server.is_open(1));
    for round in 0..50 {
        server.send(1, 0, &[&[round], &[round, 1, 2]]);
        assert_eq!(
            lines.next().unwrap(),
            format!("1 of 1 bytes, first {round:02x}, lost 0")
        );
        assert_eq!(
            lines.next().unwrap(),
            format!("3 of 3 bytes, first {round:02x}, lost 0")
        );
    }
    server.finish(1, Life::Ended);
    assert_eq!(lines.next().unwrap(), "100 received, 0 lost");
    assert!(child.wait().unwrap().success());
}

#[test]
fn the_example_works_with_the_shared_library() {
    let dir = Dir::new("c-shared");
    the_epoll_example_reads_to_the_end(&build_shared(&dir.0, "examples/epoll.c"), &dir);
}

#[test]
fn the_example_works_with_the_static_library() {
    let dir = Dir::new("c-static");
    the_epoll_example_reads_to_the_end(&build_static(&dir.0, "examples/epoll.c"), &dir);
}

#[test]
fn a_restart_of_the_daemon_shows_as_a_gap_in_c() {
    let dir = Dir::new("c-restart");
    let program = build_shared(&dir.0, "examples/epoll.c");
    let server = Server::start(&dir.socket());
    let mut child = start(&program, &dir.socket(), &["host:eth0"]);
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    eventually("the port is open", || server.is_open(1));
    server.send(1, 0, &[b"a"]);
    assert_eq!(lines.next().unwrap(), "1 of 1 bytes, first 61, lost 0");
    server.kill();
    let server = Server::start(&dir.socket());
    eventually("the port is open again", || server.is_open(1));
    server.send(1, 0, &[b"b"]);
    assert_eq!(lines.next().unwrap(), "1 of 1 bytes, first 62, lost 0, gap");
    server.finish(1, Life::Quarantined);
    assert!(!child.wait().unwrap().success());
    let text = stderr(&mut child);
    assert!(text.contains("quarantined"), "{text}");
}

#[test]
fn a_killed_reader_is_seen_by_the_server() {
    let dir = Dir::new("c-killed");
    let program = build_shared(&dir.0, "examples/epoll.c");
    let server = Server::start(&dir.socket());
    let mut child = start(&program, &dir.socket(), &["host:eth0"]);
    eventually("the port is open", || server.is_open(1));
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the port is closed", || !server.is_open(1));
}

#[test]
fn every_call_does_in_c_what_the_header_says() {
    let dir = Dir::new("c-all");
    let program = build_static(&dir.0, "tests/c/calls.c");
    let server = Server::start(&dir.socket());
    server.lock().refuse = Some((code::DENIED, "not for you".into()));
    let mut child = start(&program, &dir.socket(), &[]);
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    // The program says what it has done; the server then does its part.
    assert_eq!(lines.next().as_deref(), Some("denied"));
    server.lock().refuse = None;
    std::fs::write(dir.0.join("go"), "").unwrap();
    assert_eq!(lines.next().as_deref(), Some("armed"));
    server.send(1, 0, &[b"one", b"two", b"three"]);
    assert_eq!(lines.next().as_deref(), Some("read"));
    server.finish(1, Life::Ended);
    let done = lines.next();
    let status = child.wait().unwrap();
    assert!(
        status.success() && done.as_deref() == Some("ended"),
        "{done:?} {}",
        stderr(&mut child)
    );
}

#[test]
fn a_bundle_in_c_is_read_loses_ports_comes_back_and_goes() {
    let dir = Dir::new("c-bundle");
    let program = build_shared(&dir.0, "tests/c/bundle.c");
    let server = Server::start(&dir.socket());
    let mut command = Command::new(program);
    // It stays until its input ends, so that its end is not what closes the ports.
    let mut child = command
        .env("VNPLUG_SOCKET", dir.socket())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let hello = |server: &Server, ports: &[u32]| {
        for &port in ports {
            eventually("the port is open", || server.is_open(port));
            server.send(port, 0, &[b"hello"]);
        }
    };
    assert_eq!(lines.next().as_deref(), Some("open"));
    hello(&server, &[1, 2, 3]);
    assert_eq!(lines.next().as_deref(), Some("closed two"));
    let open: Vec<_> = (1..6).filter(|&port| server.is_open(port)).collect();
    assert_eq!(open, [2, 4]);
    server.kill();
    let server = Server::start(&dir.socket());
    hello(&server, &[1, 2]);
    assert_eq!(lines.next().as_deref(), Some("back"));
    assert_eq!(lines.next().as_deref(), Some("over"));
    eventually("both are closed", || {
        !(1..3).any(|port| server.is_open(port))
    });
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}
