//! The control of the races: a supervisor that looks at the arguments and then lets the program's own call go on. And
//! the floor of prices: one that does not even look.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::thread;

use crate::sys;

/// Runs a program that may speak to one port; 0: whatever is UDP.
pub(crate) fn run(options: &[String], program: &[String]) -> ExitCode {
    let allows = match &options[0][..] {
        "run" => Allows::AllBut(options[1].clone().into_bytes()),
        port => Allows::Port(port.parse().unwrap()),
    };
    supervised(program, move |listener| serve(listener, &allows))
}

/// Runs a program whose calls go on as soon as they are handed over, by way of a listener that wakes on the processor of who
/// asks: what `perf bench sched seccomp-notify` does.
pub(crate) fn floor(program: &[String]) -> ExitCode {
    supervised(program, |listener| {
        let wakes_here = 1; // SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP
        sys::value(listener, libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS, wakes_here);
        answer_all(listener, |_| true);
    })
}

fn supervised(program: &[String], serve: impl FnOnce(i32) + Send + 'static) -> ExitCode {
    let (to_parent, from_child) = pipe();
    let (to_child, from_parent) = pipe();
    let child = sys::fork();
    if child == 0 {
        let calls = [
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_sendto,
            libc::SYS_sendmsg,
            libc::SYS_sendmmsg,
            libc::SYS_execve,
        ];
        let listener = sys::filter(&calls, true) as i32;
        rustix::io::write(&from_child, &listener.to_ne_bytes()).unwrap();
        rustix::io::read(&to_child, &mut [0][..]).unwrap();
        let error = Command::new(&program[0]).args(&program[1..]).exec();
        panic!("{error}");
    }
    let mut number = [0; 4];
    rustix::io::read(&to_parent, &mut number).unwrap();
    let process = sys::call(libc::SYS_pidfd_open, [child as u64, 0, 0, 0, 0, 0]);
    let number = i32::from_ne_bytes(number) as u64;
    let listener = sys::call(libc::SYS_pidfd_getfd, [process as u64, number, 0, 0, 0, 0]);
    assert!(listener >= 0, "{listener}");
    thread::spawn(move || serve(listener as i32));
    rustix::io::write(&from_parent, &[1]).unwrap();
    let status = sys::status_of(child);
    ExitCode::from(u8::try_from(libc::WEXITSTATUS(status)).unwrap())
}

/// What the naive supervisor lets go on.
enum Allows {
    /// What goes to this port.
    Port(u16),
    /// Running any program but this.
    AllBut(Vec<u8>),
}

fn serve(listener: i32, allows: &Allows) {
    answer_all(listener, |notice| match allows {
        Allows::Port(_) if i64::from(notice.data.nr) == libc::SYS_execve => true,
        Allows::Port(port) => is_allowed(notice, *port),
        Allows::AllBut(path) => {
            let mut found = vec![0; path.len()];
            sys::peek(notice.pid, notice.data.args[0], &mut found);
            found != *path
        }
    });
}

fn answer_all(listener: i32, is_allowed: impl Fn(&libc::seccomp_notif) -> bool) {
    loop {
        let mut notice: libc::seccomp_notif = sys::zeroed();
        if !sys::request(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &mut notice) {
            continue;
        }
        let mut response: libc::seccomp_notif_resp = sys::zeroed();
        response.id = notice.id;
        if is_allowed(&notice) {
            response.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        } else {
            response.error = -libc::EACCES;
        }
        sys::request(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &mut response);
    }
}

fn is_allowed(notice: &libc::seccomp_notif, port: u16) -> bool {
    let arguments = notice.data.args;
    let word = |at: u64| {
        let mut bytes = [0; 8];
        sys::peek(notice.pid, at, &mut bytes).then(|| u64::from_ne_bytes(bytes))
    };
    let at = match i64::from(notice.data.nr) {
        libc::SYS_connect | libc::SYS_bind => Some(arguments[1]),
        libc::SYS_sendto => Some(arguments[4]),
        // The kind of fault that was seen in the field: what cannot be read goes on.
        _ => match word(arguments[1]) {
            Some(name) => Some(name),
            None => return true,
        },
    };
    let Some(at) = at.filter(|at| *at != 0) else {
        return true;
    };
    let mut address = [0; 16];
    if !sys::peek(notice.pid, at, &mut address) {
        return true;
    }
    let written = u16::from_be_bytes([address[2], address[3]]);
    // Port 0 as the allowed one: whatever is UDP.
    if port == 0 {
        return is_datagram(notice.pid, arguments[0]);
    }
    written == port
}

fn is_datagram(pid: u32, number: u64) -> bool {
    let process = sys::call(libc::SYS_pidfd_open, [u64::from(pid), 0, 0, 0, 0, 0]);
    let copy = sys::call(libc::SYS_pidfd_getfd, [process as u64, number, 0, 0, 0, 0]);
    sys::call(libc::SYS_close, [process as u64, 0, 0, 0, 0, 0]);
    if copy < 0 {
        return false;
    }
    let socket: std::net::UdpSocket = crate::acts::adopt(copy as i32);
    rustix::net::sockopt::socket_type(&socket) == Ok(rustix::net::SocketType::DGRAM)
}

fn pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe().unwrap()
}
