//! The ways around (F104), one attempt each: says `done`, or the error.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};

use crate::acts::outcome;
use crate::sys::{self, ADDRESS, Arena, call};

/// Tries one. Names may have a value behind `=`.
pub(crate) fn attempt(name: &str) -> String {
    let (name, value) = name.split_once('=').unwrap_or((name, ""));
    let parent = u64::from(std::os::unix::process::parent_id());
    let number = |value: &str| value.parse::<u64>().unwrap();
    match name {
        "io_uring" => {
            let mut parameters = [0_u64; 32];
            said(
                libc::SYS_io_uring_setup,
                [8, parameters.as_mut_ptr() as u64, 0, 0, 0, 0],
            )
        }
        #[cfg(target_arch = "x86_64")]
        "int80" => in_child(|| {
            // getpid
            i32::from(sys::by_old_entrance(20) <= 0)
        }),
        "x32" => said(0x4000_0000 | 39, [0; 6]),
        "ptrace" => {
            let child = sleeper();
            let attached = said(
                libc::SYS_ptrace,
                [libc::PTRACE_ATTACH as u64, child as u64, 0, 0, 0, 0],
            );
            sys::end(child);
            attached
        }
        "process_vm_writev" => {
            let child = sleeper();
            let mut byte = 1_u8;
            let part = [std::ptr::from_mut(&mut byte) as u64, 1];
            let parts = part.as_ptr() as u64;
            let written = said(
                libc::SYS_process_vm_writev,
                [child as u64, parts, 1, parts, 1, 0],
            );
            sys::end(child);
            written
        }
        // Of a process outside, of the same user.
        "proc_mem" => outcome(
            std::fs::OpenOptions::new()
                .write(true)
                .open(format!("/proc/{value}/mem")),
        ),
        "signal" => said(libc::SYS_kill, [number(value), 0, 0, 0, 0, 0]),
        "pidfd_getfd" => {
            let process = call(libc::SYS_pidfd_open, [parent, 0, 0, 0, 0, 0]);
            said(libc::SYS_pidfd_getfd, [process as u64, 0, 0, 0, 0, 0])
        }
        "kcmp" => said(
            libc::SYS_kcmp,
            [u64::from(std::process::id()), parent, 0, 0, 0, 0],
        ),
        "bpf" => said(libc::SYS_bpf, [0, 0, 0, 0, 0, 0]),
        "request_key" => {
            let (kind, name) = (c"user".as_ptr() as u64, c"vnplug".as_ptr() as u64);
            said(libc::SYS_request_key, [kind, name, 0, 0, 0, 0])
        }
        // A thread with a table of descriptors of its own, where the number is another socket.
        "own_table" => {
            let port = number(value) as u16;
            let arena = Arena::new(port, port);
            let udp = call(libc::SYS_socket, [2, 2, 0, 0, 0, 0]) as u64;
            let thread = std::thread::spawn(move || {
                let flags = libc::CLONE_FILES as u64;
                let unshared = call(libc::SYS_unshare, [flags, 0, 0, 0, 0, 0]);
                assert_eq!(unshared, 0);
                let tcp = call(libc::SYS_socket, [2, 1, 0, 0, 0, 0]) as u64;
                call(libc::SYS_dup3, [tcp, udp, 0, 0, 0, 0]);
                said(libc::SYS_connect, [udp, arena.at(ADDRESS), 16, 0, 0, 0])
            });
            thread.join().unwrap()
        }
        "userfaultfd" => said(libc::SYS_userfaultfd, [1, 0, 0, 0, 0, 0]),
        "perf" => said(libc::SYS_perf_event_open, [0, 0, 0, 0, 0, 0]),
        "setns" => {
            let own = std::fs::File::open("/proc/self/ns/net").unwrap();
            use std::os::fd::AsRawFd;
            said(libc::SYS_setns, [own.as_raw_fd() as u64, 0, 0, 0, 0, 0])
        }
        "unshare_user" => in_child(|| {
            let flags = (libc::CLONE_NEWUSER | libc::CLONE_NEWNET) as u64;
            -(call(libc::SYS_unshare, [flags, 0, 0, 0, 0, 0]) as i32)
        }),
        "clone_user" => {
            let flags = (libc::CLONE_NEWUSER | libc::SIGCHLD) as u64;
            match call(libc::SYS_clone, [flags, 0, 0, 0, 0, 0]) {
                0 => sys::leave(0),
                pid if pid > 0 => {
                    sys::end(pid as i32);
                    "done".into()
                }
                error => said_number(error),
            }
        }
        "clone3" => said(libc::SYS_clone3, [0, 0, 0, 0, 0, 0]),
        "listener" => in_child(|| -(sys::filter(&[libc::SYS_connect], true).min(0) as i32)),
        // A filter that allows everything must not lift ours: it connects.
        "stacked" => {
            let made = sys::filter(&[], false);
            if made < 0 {
                return said_number(made);
            }
            outcome(std::net::TcpStream::connect(value))
        }
        "undumpable" => {
            call(
                libc::SYS_prctl,
                [libc::PR_SET_DUMPABLE as u64, 0, 0, 0, 0, 0],
            );
            let is_dumpable = call(
                libc::SYS_prctl,
                [libc::PR_GET_DUMPABLE as u64, 0, 0, 0, 0, 0],
            );
            format!("dumpable {is_dumpable}")
        }
        "tiocsti" => {
            let byte = b"x".as_ptr() as u64;
            said(libc::SYS_ioctl, [0, libc::TIOCSTI, byte, 0, 0, 0])
        }
        "raw" => socket(libc::AF_INET, libc::SOCK_RAW, 1),
        "raw6" => socket(libc::AF_INET6, libc::SOCK_RAW, 58),
        "packet" => socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0),
        "old_packet" => socket(libc::AF_INET, 10, 0),
        "vsock" => socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0),
        "alg" => socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
        "netlink_route" => socket(libc::AF_NETLINK, libc::SOCK_RAW, 0),
        "netlink_netfilter" => socket(libc::AF_NETLINK, libc::SOCK_RAW, 12),
        "ip_options" => option(libc::AF_INET, libc::IPPROTO_IP, libc::IP_OPTIONS, &[0; 4]),
        // A routing header of type 2 without segments.
        "ipv6_rthdr" => option(libc::AF_INET6, libc::IPPROTO_IPV6, libc::IPV6_RTHDR, &[]),
        "zerocopy" => option(
            libc::AF_INET,
            libc::SOL_SOCKET,
            libc::SO_ZEROCOPY,
            &[1, 0, 0, 0],
        ),
        "abstract" => {
            let address = UnixAddr::from_abstract_name(value).unwrap();
            outcome(UnixStream::connect_addr(&address))
        }
        "path" => outcome(UnixStream::connect(value)),
        "connect" => outcome(std::net::TcpStream::connect(value)),
        "fastopen" => {
            let port = number(value) as u16;
            let arena = Arena::new(port, port);
            let socket = call(libc::SYS_socket, [2, 1, 0, 0, 0, 0]) as u64;
            let (data, flags) = (arena.at(2048), libc::MSG_FASTOPEN as u64);
            said(
                libc::SYS_sendto,
                [socket, data, 8, flags, arena.at(ADDRESS), 16],
            )
        }
        "unconnected_write" => {
            let socket = call(libc::SYS_socket, [2, 1, 0, 0, 0, 0]) as u64;
            call(libc::SYS_rt_sigprocmask, [0; 6]);
            let (data, flags) = (b"x".as_ptr() as u64, libc::MSG_NOSIGNAL as u64);
            said(libc::SYS_sendto, [socket, data, 1, flags, 0, 0])
        }
        "sendfile" => {
            use std::os::fd::AsRawFd;
            let file = std::fs::File::open("/proc/self/exe").unwrap();
            let socket = call(libc::SYS_socket, [2, 2, 0, 0, 0, 0]) as u64;
            said(
                libc::SYS_sendfile,
                [socket, file.as_raw_fd() as u64, 0, 16, 0, 0],
            )
        }
        "run" => {
            outcome(std::process::Command::new(value).status().and_then(
                |status| match status.code() {
                    Some(0) => Ok(()),
                    _ => Err(std::io::Error::other(status.to_string())),
                },
            ))
        }
        // A program without a name: a copy of the file in memory that belongs to nobody else.
        "run_memory" => {
            use std::io::Write;
            use std::os::fd::AsRawFd;
            let flags = rustix::fs::MemfdFlags::empty();
            let memory = rustix::fs::memfd_create("copy", flags).unwrap();
            let mut memory = std::fs::File::from(memory);
            memory.write_all(&std::fs::read(value).unwrap()).unwrap();
            let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
            outcome(std::process::Command::new(path).status())
        }
        "read" => outcome(std::fs::read(value)),
        "write" => outcome(std::fs::write(value, "written\n")),
        "append" => outcome(
            std::fs::OpenOptions::new()
                .append(true)
                .open(value)
                .and_then(|mut file| std::io::Write::write_all(&mut file, b"more\n")),
        ),
        "unlink" => outcome(std::fs::remove_file(value)),
        "mkdir" => outcome(std::fs::create_dir(value)),
        "rmdir" => outcome(std::fs::remove_dir(value)),
        "rename" | "link" | "symlink" => {
            let (from, to) = value.split_once(':').unwrap();
            outcome(match name {
                "rename" => std::fs::rename(from, to),
                "link" => std::fs::hard_link(from, to),
                _ => std::os::unix::fs::symlink(from, to),
            })
        }
        // bind to a port that was judged and is taken, then to any, and listen there.
        "failed_bind" => {
            let port = number(value) as u16;
            let arena = Arena::new(port, port);
            let socket = call(libc::SYS_socket, [2, 1, 0, 0, 0, 0]) as u64;
            let bind = || call(libc::SYS_bind, [socket, arena.at(ADDRESS), 16, 0, 0, 0]);
            let taken = bind();
            arena.port().store(0, std::sync::atomic::Ordering::Relaxed);
            let any = bind();
            let listens = said(libc::SYS_listen, [socket, 1, 0, 0, 0, 0]);
            format!("{} {} {listens}", said_number(taken), said_number(any))
        }
        // Many connections of its own that it may not accept, all of them there before.
        "refused_many" => {
            let port = number(value) as u16;
            let arena = Arena::new(port, port);
            let flags = (libc::SOCK_STREAM | libc::SOCK_NONBLOCK) as u64;
            let socket = call(libc::SYS_socket, [2, flags, 0, 0, 0, 0]) as u64;
            call(libc::SYS_bind, [socket, arena.at(ADDRESS), 16, 0, 0, 0]);
            call(libc::SYS_listen, [socket, 4096, 0, 0, 0, 0]);
            for _ in 0..4000 {
                drop(std::net::TcpStream::connect(("127.0.0.1", port)).unwrap());
            }
            said(libc::SYS_accept, [socket, 0, 0, 0, 0, 0])
        }
        // Binds a socket of its own again and again while another thread puts the file of another one in its place.
        "own_path" => own_path(value),
        // No root any more: whom does the other end see?
        "no_root" => {
            let ids = [65_534_u64; 3];
            let [a, b, c] = ids;
            call(libc::SYS_setgroups, [0; 6]);
            call(libc::SYS_setresgid, [a, b, c, 0, 0, 0]);
            call(libc::SYS_setresuid, [a, b, c, 0, 0, 0]);
            outcome(UnixStream::connect(value))
        }
        "descriptors" => {
            let names = std::fs::read_dir("/proc/self/fd").unwrap();
            let mut numbers: Vec<u32> = names
                .filter_map(|name| name.ok()?.file_name().to_str()?.parse().ok())
                .collect();
            numbers.sort_unstable();
            // The last is the directory's own.
            numbers.pop();
            format!("{numbers:?}")
        }
        "no_new_privs" => {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("NoNewPrivs:"));
            line.unwrap_or("").trim().to_string()
        }
        _ => format!("unknown: {name}"),
    }
}

/// Whether a file of somebody else's socket came to be taken for the own one: `value` is that file.
fn own_path(value: &str) -> String {
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicBool, Ordering};
    let own = format!("{value}.own");
    let goes_on = std::sync::Arc::new(AtomicBool::new(true));
    let (other, at, going) = (value.to_owned(), own.clone(), goes_on.clone());
    // A hard link of the other one's file replaces ours as soon as ours is there.
    let replacer = std::thread::spawn(move || {
        let next = format!("{other}.next");
        while going.load(Ordering::Relaxed) {
            let _ = std::fs::hard_link(&other, &next);
            if std::fs::exists(&at).unwrap_or(false) {
                let _ = std::fs::rename(&next, &at);
            }
        }
    });
    let mut passed = 0;
    for _ in 0..2000 {
        let _ = std::fs::remove_file(&own);
        drop(UnixListener::bind(&own));
        passed += u32::from(UnixStream::connect(value).is_ok());
    }
    goes_on.store(false, Ordering::Relaxed);
    replacer.join().unwrap();
    // The control: its own socket is its own as long as nobody meddles.
    let _ = std::fs::remove_file(&own);
    let _own = UnixListener::bind(&own);
    format!("passed={passed} own {}", outcome(UnixStream::connect(&own)))
}

fn said(number: libc::c_long, arguments: [u64; 6]) -> String {
    said_number(call(number, arguments))
}

fn said_number(result: i64) -> String {
    if result >= 0 {
        return "done".into();
    }
    outcome::<()>(Err(std::io::Error::from_raw_os_error(-result as i32)))
}

fn socket(domain: i32, kind: i32, protocol: i32) -> String {
    said(
        libc::SYS_socket,
        [domain as u64, kind as u64, protocol as u64, 0, 0, 0],
    )
}

fn option(domain: i32, level: i32, name: i32, value: &[u8]) -> String {
    let socket = call(
        libc::SYS_socket,
        [domain as u64, libc::SOCK_DGRAM as u64, 0, 0, 0, 0],
    );
    let pointer = value.as_ptr() as u64;
    let length = value.len() as u64;
    said(
        libc::SYS_setsockopt,
        [socket as u64, level as u64, name as u64, pointer, length, 0],
    )
}

/// What a child returns; the number of the signal if one ended it.
fn in_child(act: impl FnOnce() -> i32) -> String {
    let pid = sys::fork();
    if pid == 0 {
        sys::leave(act());
    }
    let status = sys::status_of(pid);
    if libc::WIFSIGNALED(status) {
        format!("signal {}", libc::WTERMSIG(status))
    } else {
        said_number(-i64::from(libc::WEXITSTATUS(status)))
    }
}

fn sleeper() -> i32 {
    let pid = sys::fork();
    if pid == 0 {
        std::thread::sleep(std::time::Duration::from_secs(10));
        sys::leave(0);
    }
    pid
}
