//! F104: ways around, one attempt each. Without the sandbox the same attempt has another outcome (but where an
//! ordinary user cannot try it at all), so that it is the sandbox which closes it.

use std::collections::HashMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use crate::support::{Port, as_nobody, open_dir, said, sandboxed};

/// Attempt, outcome in the sandbox, and whether an ordinary user can do it outside on the test machine.
const CLOSED: &[(&str, &str, bool)] = &[
    // First: the others leave some open.
    ("descriptors", "[0, 1, 2]", false),
    ("io_uring", "ENOSYS", true),
    ("x32", "ENOSYS", false),
    ("ptrace", "EPERM", true),
    ("process_vm_writev", "EPERM", true),
    ("pidfd_getfd", "EPERM", false),
    ("bpf", "EPERM", false),
    ("userfaultfd", "EPERM", true),
    ("perf", "EPERM", false),
    ("request_key", "EPERM", true),
    ("setns", "EPERM", false),
    ("unshare_user", "EPERM", true),
    ("clone_user", "EPERM", true),
    ("clone3", "ENOSYS", true),
    ("listener", "EBUSY", true),
    ("undumpable", "dumpable 1", true),
    ("tiocsti", "EPERM", true),
    ("raw", "EACCES", false),
    ("raw6", "EACCES", false),
    ("packet", "EACCES", false),
    ("old_packet", "EACCES", false),
    ("vsock", "EACCES", true),
    ("alg", "EACCES", true),
    ("netlink_netfilter", "EACCES", true),
    ("ip_options", "EPERM", true),
    ("ipv6_rthdr", "EPERM", true),
    ("zerocopy", "EOPNOTSUPP", true),
    ("no_new_privs", "1", true),
];

#[test]
fn every_way_around_is_closed() {
    let names: Vec<&str> = CLOSED.iter().map(|(name, ..)| *name).collect();
    let words = [&["channel"], &names[..]].concat();
    let inside = outcomes(&said(&mut sandboxed(&[], &words)));
    let outside = outcomes(&said(&mut as_nobody(&words)));
    let mut wrong = Vec::new();
    for (name, expected, is_open_outside) in CLOSED {
        let (inside, outside) = (&inside[*name], &outside[*name]);
        if inside != expected {
            wrong.push(format!("{name}: {inside} instead of {expected}"));
        }
        if *is_open_outside && outside == inside {
            wrong.push(format!("{name}: {outside} outside too"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_call_by_the_32_bit_entrance_ends_the_program() {
    let inside = said(&mut sandboxed(&["all"], &["channel", "int80"]));
    assert_eq!(inside, "int80 signal 31");
    assert_eq!(said(&mut as_nobody(&["channel", "int80"])), "int80 done");
}

#[test]
fn a_process_outside_can_be_neither_written_to_nor_signalled() {
    let mut outside = as_nobody(&["hold", "1"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let pid = outside.id();
    let attempts = [format!("proc_mem={pid}"), format!("signal={pid}")];
    let words = ["channel", &attempts[0], &attempts[1]];
    let inside = said(&mut sandboxed(&["all"], &words));
    let control = said(&mut as_nobody(&words));
    outside.kill().unwrap();
    outside.wait().unwrap();
    assert_eq!(inside, "proc_mem EACCES\nsignal EPERM");
    assert_eq!(control, "proc_mem done\nsignal done");
}

#[test]
fn a_filter_of_the_programs_own_does_not_lift_ours() {
    let port = Port::new();
    let attempt = format!("stacked={}", port.name());
    let words = ["channel", &attempt];
    assert_eq!(said(&mut sandboxed(&[], &words)), "stacked EACCES");
    assert_eq!(
        said(&mut sandboxed(&[&port.name()], &words)),
        "stacked done"
    );
}

#[test]
fn fast_open_and_calls_without_an_address_reach_nobody_that_was_not_allowed() {
    let port = Port::new();
    let attempt = format!("fastopen={}", port.number);
    let words = ["channel", &attempt, "unconnected_write", "sendfile"];
    let refused = said(&mut sandboxed(&[], &words));
    assert_eq!(
        refused,
        "fastopen EACCES\nunconnected_write EPIPE\nsendfile EDESTADDRREQ"
    );
    assert_eq!(port.arrived(), 0);
    let done = said(&mut sandboxed(&[&port.name()], &words));
    assert!(done.starts_with("fastopen done"), "{done}");
    assert_eq!(port.arrived(), 1);
}

#[test]
fn a_number_means_what_it_is_in_the_table_of_the_thread_that_calls() {
    let port = Port::new();
    let attempt = format!("own_table={}", port.number);
    let words = ["channel", &attempt];
    let udp = format!("udp/{}", port.name());
    assert_eq!(said(&mut sandboxed(&[&udp], &words)), "own_table EACCES");
    let tcp = format!("tcp/{}", port.name());
    assert_eq!(said(&mut sandboxed(&[&tcp], &words)), "own_table done");
}

#[test]
fn unix_sockets_outside_are_judged_by_path_and_by_name() {
    let dir = open_dir("sandbox-unix");
    let path = dir.path("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let name = format!("vnplug-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _abstract = UnixListener::bind_addr(&address).unwrap();
    let path = path.to_str().unwrap();
    let attempts = [format!("path={path}"), format!("abstract={name}")];
    let words = ["channel", &attempts[0], &attempts[1]];
    let refused = said(&mut sandboxed(&[], &words));
    assert_eq!(refused, "path EACCES\nabstract EACCES");
    let allowed = said(&mut sandboxed(&[path, &format!("@{name}")], &words));
    assert_eq!(allowed, "path done\nabstract done");
}

#[test]
fn a_file_that_is_put_in_the_place_of_the_own_socket_is_not_taken_for_it() {
    use std::os::unix::fs::{MetadataExt, chown};
    let dir = open_dir("sandbox-own");
    let path = dir.path("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    // So that the program may link it.
    if rustix::process::geteuid().is_root() {
        chown(&path, Some(65_534), Some(65_534)).unwrap();
    }
    let attempt = format!("own_path={}", path.display());
    let text = said(&mut sandboxed(&[], &["channel", &attempt]));
    assert_eq!(text, "own_path passed=0 own done");
    assert!(std::fs::metadata(&path).unwrap().nlink() >= 1);
}

#[test]
fn a_port_is_judged_when_the_judged_one_could_not_be_had() {
    let port = Port::new();
    let attempt = format!("failed_bind={}", port.number);
    let inside = said(&mut sandboxed(&[&port.name()], &["channel", &attempt]));
    assert_eq!(inside, "failed_bind EADDRINUSE done EACCES");
    let outside = said(&mut as_nobody(&["channel", &attempt]));
    assert_eq!(outside, "failed_bind EADDRINUSE done done");
}

#[test]
fn any_number_of_refused_connections_is_turned_away() {
    let port = crate::support::free_port();
    let name = format!("127.0.0.1:{port}");
    let attempt = format!("refused_many={port}");
    let inside = said(&mut sandboxed(&[&name], &["channel", &attempt]));
    assert_eq!(inside, "refused_many EAGAIN");
}

#[test]
fn who_gave_root_up_is_seen_as_who_it_is() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = open_dir("sandbox-no-root");
    let path = dir.path("socket");
    let listener = UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let attempt = format!("no_root={}", path.display());
    let words = sandboxed(&["all"], &["channel", &attempt]);
    let mut command = std::process::Command::new(words.get_program());
    assert_eq!(said(command.args(words.get_args())), "no_root done");
    let (stream, _) = listener.accept().unwrap();
    let seen = rustix::net::sockopt::socket_peercred(&stream).unwrap();
    assert_eq!((seen.uid.as_raw(), seen.gid.as_raw()), (65_534, 65_534));
}

#[test]
fn a_socket_that_comes_from_outside_is_not_let_in() {
    // As standard input it is refused; with another number it is closed.
    let port = Port::new();
    let stream = std::net::TcpStream::connect(port.name()).unwrap();
    let mut command = sandboxed(&["all"], &["channel", "descriptors"]);
    command.stdin(std::os::fd::OwnedFd::from(stream));
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("descriptor 0 is a socket of the network"),
        "{error}"
    );
}

fn outcomes(text: &str) -> HashMap<String, String> {
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines
        .map(|(name, outcome)| (name.to_string(), outcome.to_string()))
        .collect()
}
