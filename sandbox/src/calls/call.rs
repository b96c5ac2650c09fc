//! A system call that was handed over, as its registers say it.

use super::execute::Execute;
use super::files::Change;
use crate::sys::seccomp::Notice;

/// A place in the program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Address of the first byte; 0 is none.
    pub(super) at: u64,
    /// How many bytes there are.
    pub(super) length: u64,
}

/// A call and its arguments. Numbers are cut to what the kernel reads: an `int` is the lower half of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// socket(2)
    Socket {
        domain: i32,
        kind: i32,
        protocol: i32,
    },
    /// connect(2)
    Connect { socket: i32, address: Span },
    /// bind(2)
    Bind { socket: i32, address: Span },
    /// listen(2)
    Listen { socket: i32, backlog: i32 },
    /// accept(2) and accept4(2); `length` is where the length stands.
    Accept {
        socket: i32,
        address: u64,
        length: u64,
        flags: i32,
    },
    /// sendto(2)
    SendTo {
        socket: i32,
        data: Span,
        flags: i32,
        address: Span,
    },
    /// sendmsg(2)
    SendMsg {
        socket: i32,
        message: u64,
        flags: i32,
    },
    /// A change of files.
    Change(Change),
    /// execve(2) and execveat(2)
    Execute(Execute),
    /// sendmmsg(2)
    SendMany {
        socket: i32,
        messages: u64,
        count: u32,
        flags: i32,
    },
}

impl Call {
    /// What a notice says; `None` for a number that the filter does not hand over.
    pub(super) fn of(notice: &Notice) -> Option<Self> {
        let register = notice.arguments;
        let int = |index: usize| register[index] as i32;
        // socklen_t is 32 bits, and negative ones are refused like too large ones.
        let span = |at: usize, length: usize| Span {
            at: register[at],
            length: u64::from(register[length] as u32),
        };
        let socket = int(0);
        Some(match notice.number {
            libc::SYS_socket => Self::Socket {
                domain: int(0),
                kind: int(1),
                protocol: int(2),
            },
            libc::SYS_connect => Self::Connect {
                socket,
                address: span(1, 2),
            },
            libc::SYS_bind => Self::Bind {
                socket,
                address: span(1, 2),
            },
            libc::SYS_listen => Self::Listen {
                socket,
                backlog: int(1),
            },
            libc::SYS_accept | libc::SYS_accept4 => Self::Accept {
                socket,
                address: register[1],
                length: register[2],
                flags: if notice.number == libc::SYS_accept4 {
                    int(3)
                } else {
                    0
                },
            },
            libc::SYS_sendto => Self::SendTo {
                socket,
                data: Span {
                    at: register[1],
                    length: register[2],
                },
                flags: int(3),
                address: span(4, 5),
            },
            libc::SYS_sendmsg => Self::SendMsg {
                socket,
                message: register[1],
                flags: int(2),
            },
            libc::SYS_sendmmsg => Self::SendMany {
                socket,
                messages: register[1],
                count: register[2] as u32,
                flags: int(3),
            },
            libc::SYS_execve | libc::SYS_execveat => Self::Execute(Execute::of(notice)),
            _ => Self::Change(Change::of(notice)?),
        })
    }
}
