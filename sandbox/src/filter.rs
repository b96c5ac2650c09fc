//! The filter of system calls: what passes, what is refused at once, and what is handed over.
//!
//! It decides on registers alone, which is all that a filter sees. Calls that pass without a look at their
//! arguments cost nothing: the kernel (5.11) knows them by number.
//!
//! | calls | |
//! |---|---|
//! | connect, bind, listen, accept, accept4, sendmsg, sendmmsg; sendto with an address; socket of other kinds than plain TCP, UDP, ICMP and Unix sockets | handed over |
//! | ways around: io_uring, ptrace, other namespaces, `bpf`, a listener of another filter … | refused |
//! | source routes (`IP_OPTIONS`, `IPV6_RTHDR`), which name another first hop than the address that was judged | refused |
//! | a foreign architecture | kills the program |
//! | everything else | passes |

use libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long,
    sock_filter,
};

/// What the filter has to know of the kernel and the user's wishes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// All threads of a process must share one table of descriptors: the kernel cannot name the table of a single
    /// thread (before 6.9).
    pub(crate) one_table: bool,
    /// Changes of files and running them are handed over too.
    pub(crate) files: bool,
}

/// The filter's program.
pub(crate) fn program(terms: Terms) -> Vec<sock_filter> {
    let mut code = vec![
        load(ARCHITECTURE_AT),
        jump(BPF_JEQ, ARCHITECTURE, 1, 0),
        give(KILL),
        load(0),
    ];
    if cfg!(target_arch = "x86_64") {
        // x32: the same architecture by name, with other calls behind the numbers.
        code.extend([jump(BPF_JGE, X32, 0, 1), give(error(libc::ENOSYS))]);
    }
    for (number, steps) in rules(terms) {
        let steps = assemble(&steps);
        let length = u8::try_from(steps.len()).expect("rules are short");
        code.push(jump(BPF_JEQ, number as u32, 0, length));
        code.extend(steps);
    }
    code.push(give(ALLOW));
    code
}

/// What becomes of a call; a rule ends with `Give`.
enum Step {
    /// It gets this action.
    Give(u32),
    /// The steps are taken if the lower half of the argument has, under the mask, this value.
    When(Part, u32, Vec<Step>),
    /// The action is given unless the part has one of these values.
    Unless(Part, &'static [u32], u32),
    /// The action is given if any bit of the argument is set.
    IfAny(usize, u32),
}

/// The lower half of an argument under a mask: what the kernel reads of an `int`.
#[derive(Clone, Copy)]
struct Part(usize, u32);

use Step::{Give, IfAny, Unless, When};

/// The calls that do not simply pass.
fn rules(terms: Terms) -> Vec<(c_long, Vec<Step>)> {
    let whole = |argument| Part(argument, u32::MAX);
    let mut rules: Vec<(c_long, Vec<Step>)> = Vec::new();
    for number in HANDED_OVER {
        rules.push((*number, vec![Give(ASK)]));
    }
    for (number, errno) in REFUSED {
        rules.push((*number, vec![Give(error(*errno))]));
    }
    if terms.files {
        files(&mut rules);
    }
    let refused = || vec![Give(error(libc::EPERM))];
    rules.push((
        libc::SYS_sendto,
        vec![
            IfAny(4, ASK),
            When(
                Part(3, libc::MSG_FASTOPEN as u32),
                libc::MSG_FASTOPEN as u32,
                vec![Give(ASK)],
            ),
            Give(ALLOW),
        ],
    ));
    // AF_INET and AF_INET6: socket types 1 and 2 without their flags, and protocols whose addresses are judged
    // at connect and sendto.
    let plain = || {
        vec![
            Unless(Part(1, 0xf), &[SOCK_STREAM, SOCK_DGRAM], ASK),
            Unless(whole(2), PLAIN_PROTOCOLS, ASK),
            Give(ALLOW),
        ]
    };
    rules.push((
        libc::SYS_socket,
        vec![
            When(whole(0), libc::AF_UNIX as u32, vec![Give(ALLOW)]),
            When(whole(0), libc::AF_INET as u32, plain()),
            When(whole(0), libc::AF_INET6 as u32, plain()),
            When(
                whole(0),
                libc::AF_NETLINK as u32,
                vec![Unless(whole(2), &[0], ASK), Give(ALLOW)],
            ),
            Give(ASK),
        ],
    ));
    rules.push((
        libc::SYS_socketpair,
        vec![
            Unless(whole(0), &[libc::AF_UNIX as u32], error(libc::EOPNOTSUPP)),
            Give(ALLOW),
        ],
    ));
    rules.push((libc::SYS_setsockopt, options()));
    rules.push((
        libc::SYS_getsockopt,
        vec![
            When(
                whole(1),
                SOL_SCTP,
                vec![When(whole(2), SCTP_CONNECTX3, refused())],
            ),
            Give(ALLOW),
        ],
    ));
    let mut clone = vec![];
    let mut unshare = vec![];
    for bit in 0..32 {
        if NAMESPACES & (1 << bit) != 0 {
            clone.push(When(Part(CLONE_FLAGS, 1 << bit), 1 << bit, refused()));
            unshare.push(When(Part(0, 1 << bit), 1 << bit, refused()));
        }
    }
    if terms.one_table {
        let (thread, files) = (libc::CLONE_THREAD as u32, libc::CLONE_FILES as u32);
        clone.push(When(Part(CLONE_FLAGS, thread | files), thread, refused()));
        unshare.push(When(Part(0, files), files, refused()));
        const UNSHARE: u32 = 2; // CLOSE_RANGE_UNSHARE
        rules.push((
            libc::SYS_close_range,
            vec![When(Part(2, UNSHARE), UNSHARE, refused()), Give(ALLOW)],
        ));
    }
    clone.push(Give(ALLOW));
    unshare.push(Give(ALLOW));
    rules.push((libc::SYS_clone, clone));
    rules.push((libc::SYS_unshare, unshare));
    // Another filter may stand above this one, but none with a listener: its listener would be asked
    // instead of ours. The kernel says EBUSY too.
    let listener = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER as u32;
    rules.push((
        libc::SYS_seccomp,
        vec![
            When(Part(1, listener), listener, vec![Give(error(libc::EBUSY))]),
            Give(ALLOW),
        ],
    ));
    // A process that cannot be looked at has no network. It is told that it is one, and stays as it is:
    // a program that asks for it as a precaution would end otherwise.
    rules.push((
        libc::SYS_prctl,
        vec![
            When(
                whole(0),
                libc::PR_SET_DUMPABLE as u32,
                vec![When(whole(1), 0, vec![Give(error(0))])],
            ),
            // Whoever has the right could say that it is another program (PR_SET_MM_EXE_FILE).
            When(whole(0), libc::PR_SET_MM as u32, refused()),
            Give(ALLOW),
        ],
    ));
    // What is typed into the terminal is read by the shell outside.
    rules.push((
        libc::SYS_ioctl,
        vec![
            When(whole(1), libc::TIOCSTI as u32, refused()),
            When(whole(1), TIOCLINUX, refused()),
            Give(ALLOW),
        ],
    ));
    rules
}

/// Calls that change files or run them. Opening to read passes: how a file is opened stands in a register.
fn files(rules: &mut Vec<(c_long, Vec<Step>)>) {
    let opens = |flags: usize| {
        let bits = [
            libc::O_WRONLY,
            libc::O_RDWR,
            libc::O_CREAT,
            libc::O_TRUNC,
            libc::O_TMPFILE & !libc::O_DIRECTORY,
        ];
        let asks = bits.map(|bit| When(Part(flags, bit as u32), bit as u32, vec![Give(ASK)]));
        asks.into_iter().chain([Give(ALLOW)]).collect()
    };
    rules.push((libc::SYS_openat, opens(2)));
    #[cfg(target_arch = "x86_64")]
    rules.push((libc::SYS_open, opens(1)));
    // Its flags lie in memory; libraries take openat instead.
    rules.push((libc::SYS_openat2, vec![Give(error(libc::ENOSYS))]));
    for number in FILE_CALLS {
        rules.push((*number, vec![Give(ASK)]));
    }
}

/// setsockopt: what would send packets to another address than the one that is judged, and what the
/// emulation of sendmsg cannot keep.
fn options() -> Vec<Step> {
    let whole = |argument| Part(argument, u32::MAX);
    let refuse = |names: &[i32]| {
        let each = names.iter();
        each.map(|name| When(whole(2), *name as u32, vec![Give(error(libc::EPERM))]))
            .collect::<Vec<_>>()
    };
    vec![
        When(
            whole(1),
            libc::IPPROTO_IP as u32,
            refuse(&[libc::IP_OPTIONS]),
        ),
        When(
            whole(1),
            libc::IPPROTO_IPV6 as u32,
            refuse(&[
                libc::IPV6_RTHDR,
                libc::IPV6_2292RTHDR,
                libc::IPV6_2292PKTOPTIONS,
                libc::IPV6_FLOWLABEL_MGR,
            ]),
        ),
        When(whole(1), SOL_SCTP, refuse(SCTP_CONNECTS)),
        When(
            whole(1),
            libc::SOL_SOCKET as u32,
            vec![When(
                whole(2),
                libc::SO_ZEROCOPY as u32,
                vec![Give(error(libc::EOPNOTSUPP))],
            )],
        ),
        Give(ALLOW),
    ]
}

/// Instructions of steps. A step that does not give anything leaves the register undefined; each loads
/// what it looks at.
fn assemble(steps: &[Step]) -> Vec<sock_filter> {
    let mut code = Vec::new();
    for step in steps {
        match step {
            Give(action) => code.push(give(*action)),
            When(part, value, inner) => {
                let inner = assemble(inner);
                let length = u8::try_from(inner.len()).expect("rules are short");
                code.extend(part.load());
                code.push(jump(BPF_JEQ, *value, 0, length));
                code.extend(inner);
            }
            Unless(part, values, action) => {
                code.extend(part.load());
                let count = u8::try_from(values.len()).expect("rules are short");
                for (index, value) in (0_u8..).zip(*values) {
                    code.push(jump(BPF_JEQ, *value, count - index, 0));
                }
                code.push(give(*action));
            }
            IfAny(argument, action) => {
                code.push(load(argument_at(*argument)));
                code.push(jump(BPF_JEQ, 0, 1, 0));
                code.push(give(*action));
                code.push(load(argument_at(*argument) + 4));
                code.push(jump(BPF_JEQ, 0, 1, 0));
                code.push(give(*action));
            }
        }
    }
    code
}

impl Part {
    fn load(self) -> Vec<sock_filter> {
        let mut code = vec![load(argument_at(self.0))];
        if self.1 != u32::MAX {
            code.push(instruction(BPF_ALU | BPF_AND | BPF_K, 0, 0, self.1));
        }
        code
    }
}

fn load(at: u32) -> sock_filter {
    instruction(BPF_LD | BPF_W | BPF_ABS, 0, 0, at)
}

fn jump(test: u32, value: u32, yes: u8, no: u8) -> sock_filter {
    instruction(BPF_JMP | test | BPF_K, yes, no, value)
}

fn give(action: u32) -> sock_filter {
    instruction(BPF_RET | BPF_K, 0, 0, action)
}

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

const fn error(number: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | number as u32
}

/// Where the lower half of an argument stands in `struct seccomp_data`, on machines with the low byte first.
fn argument_at(argument: usize) -> u32 {
    16 + 8 * argument as u32
}

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const ASK: u32 = libc::SECCOMP_RET_USER_NOTIF;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;
const ARCHITECTURE_AT: u32 = 4;
const X32: u32 = 0x4000_0000;
const SOCK_STREAM: u32 = libc::SOCK_STREAM as u32;
const SOCK_DGRAM: u32 = libc::SOCK_DGRAM as u32;
const TIOCLINUX: u32 = 0x541c;
/// `SOL_SCTP`: its options, some of which connect and bind.
const SOL_SCTP: u32 = 132;
/// BINDX_ADD, BINDX_REM, CONNECTX_OLD, CONNECTX of `linux/sctp.h`.
const SCTP_CONNECTS: &[i32] = &[100, 101, 107, 110];
/// SCTP_SOCKOPT_CONNECTX3, which getsockopt does.
const SCTP_CONNECTX3: u32 = 111;

/// Default, TCP, UDP, UDP-Lite, MPTCP, and ICMP by datagram sockets.
const PLAIN_PROTOCOLS: &[u32] = &[
    0,
    libc::IPPROTO_TCP as u32,
    libc::IPPROTO_UDP as u32,
    libc::IPPROTO_UDPLITE as u32,
    libc::IPPROTO_MPTCP as u32,
    libc::IPPROTO_ICMP as u32,
    libc::IPPROTO_ICMPV6 as u32,
];

/// Namespaces in which the program could give itself rights, or where names mean something else.
const NAMESPACES: u32 = (libc::CLONE_NEWUSER
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP) as u32;

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7; // AUDIT_ARCH_AARCH64

/// Where clone(2) has its flags: the first argument on both architectures.
const CLONE_FLAGS: usize = 0;

/// Handed over whatever their arguments are.
const HANDED_OVER: &[c_long] = &[
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
];

/// Handed over with `--files`, beside open and openat.
const FILE_CALLS: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_creat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mknod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_link,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_symlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_renameat,
    libc::SYS_truncate,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
];

/// Refused, with the error that programs know to take.
const REFUSED: &[(c_long, i32)] = &[
    // The kernel does with them what the filter does not see.
    (libc::SYS_io_uring_setup, libc::ENOSYS),
    (libc::SYS_io_uring_enter, libc::ENOSYS),
    (libc::SYS_io_uring_register, libc::ENOSYS),
    // Its flags lie in memory; libraries take clone instead.
    (libc::SYS_clone3, libc::ENOSYS),
    (libc::SYS_ptrace, libc::EPERM),
    (libc::SYS_process_vm_writev, libc::EPERM),
    (libc::SYS_pidfd_getfd, libc::EPERM),
    (libc::SYS_kcmp, libc::EPERM),
    (libc::SYS_setns, libc::EPERM),
    (libc::SYS_bpf, libc::EPERM),
    (libc::SYS_perf_event_open, libc::EPERM),
    // The kernel would have a program outside look for the key, by DNS too.
    (libc::SYS_request_key, libc::EPERM),
    // Whoever serves page faults could hold the supervisor while it reads.
    (libc::SYS_userfaultfd, libc::EPERM),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// What the filter gives for a call: the few instructions it has, executed.
    fn run(terms: Terms, architecture: u32, number: c_long, arguments: [u64; 6]) -> u32 {
        let word = |at: u32| match at {
            0 => number as u32,
            4 => architecture,
            at => {
                let argument = arguments[(at as usize - 16) / 8];
                (argument >> ((at % 8) * 8)) as u32
            }
        };
        let code = program(terms);
        let (mut at, mut register) = (0, 0);
        loop {
            let step = code[at];
            at += 1;
            let operation = u32::from(step.code);
            if operation == BPF_RET | BPF_K {
                return step.k;
            } else if operation == BPF_LD | BPF_W | BPF_ABS {
                register = word(step.k);
            } else if operation == BPF_ALU | BPF_AND | BPF_K {
                register &= step.k;
            } else {
                let holds = match operation & !(BPF_JMP | BPF_K) {
                    BPF_JEQ => register == step.k,
                    BPF_JGE => register >= step.k,
                    other => panic!("instruction {other:#x}"),
                };
                at += usize::from(if holds { step.jt } else { step.jf });
            }
        }
    }

    fn here(number: c_long, arguments: &[u64]) -> u32 {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        run(Terms::default(), ARCHITECTURE, number, all)
    }

    #[test]
    fn other_architectures_kill_and_x32_does_not_exist() {
        assert_eq!(run(Terms::default(), 0x4000_0003, 1, [0; 6]), KILL);
        if cfg!(target_arch = "x86_64") {
            let connect = i64::from(X32) | libc::SYS_connect;
            assert_eq!(here(connect, &[]), error(libc::ENOSYS));
        }
    }

    #[test]
    fn sockets_of_plain_kinds_pass_and_others_are_handed_over() {
        let (unix, inet, inet6, netlink, packet) = (1, 2, 10, 16, 17);
        let flags = (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) as u64;
        for (arguments, expected) in [
            ([unix, 1, 0], ALLOW),
            ([unix, 5 | flags, 0], ALLOW),
            ([inet, 1 | flags, 0], ALLOW),
            ([inet6, 2, 17], ALLOW),
            ([inet, 1, 262], ALLOW),
            ([inet, 2, 1], ALLOW),
            ([inet, 3, 1], ASK),
            ([inet, 10, 0x300], ASK),
            ([inet, 1, 132], ASK),
            ([inet6, 5, 132], ASK),
            ([netlink, 3, 0], ALLOW),
            ([netlink, 3, 12], ASK),
            ([packet, 3, 0x300], ASK),
            ([40, 1, 0], ASK),
            ([38, 5, 0], ASK),
            // The kernel reads an int: the upper half says nothing.
            ([inet | 1 << 32, 3, 0], ASK),
            ([unix | 5 << 32, 1, 0], ALLOW),
        ] {
            assert_eq!(
                here(libc::SYS_socket, &arguments),
                expected,
                "{arguments:?}"
            );
        }
    }

    #[test]
    fn sendto_passes_without_an_address_only() {
        let fast = libc::MSG_FASTOPEN as u64;
        let sendto = libc::SYS_sendto;
        assert_eq!(here(sendto, &[3, 1, 1, 0, 0, 0]), ALLOW);
        assert_eq!(here(sendto, &[3, 1, 1, 0, 0x1000, 16]), ASK);
        assert_eq!(here(sendto, &[3, 1, 1, 0, 1 << 32, 16]), ASK);
        assert_eq!(here(sendto, &[3, 1, 1, fast | 0x4000, 0, 0]), ASK);
    }

    #[test]
    fn namespaces_listeners_and_source_routes_are_refused() {
        let refused = error(libc::EPERM);
        let (user, thread) = (libc::CLONE_NEWUSER as u64, libc::CLONE_THREAD as u64);
        assert_eq!(here(libc::SYS_unshare, &[user]), refused);
        assert_eq!(here(libc::SYS_clone, &[user | 17]), refused);
        assert_eq!(here(libc::SYS_clone, &[thread]), ALLOW);
        let alone = Terms {
            one_table: true,
            ..Terms::default()
        };
        let clone = |flags| run(alone, ARCHITECTURE, libc::SYS_clone, [flags, 0, 0, 0, 0, 0]);
        assert_eq!(clone(thread), refused);
        assert_eq!(clone(thread | libc::CLONE_FILES as u64), ALLOW);
        assert_eq!(here(libc::SYS_seccomp, &[1, 8 | 1]), error(libc::EBUSY));
        assert_eq!(here(libc::SYS_seccomp, &[1, 1]), ALLOW);
        assert_eq!(here(libc::SYS_prctl, &[4, 0]), error(0));
        assert_eq!(here(libc::SYS_prctl, &[4, 1]), ALLOW);
        assert_eq!(here(libc::SYS_prctl, &[35, 13, 3]), refused);
        assert_eq!(here(libc::SYS_setsockopt, &[3, 0, 4]), refused);
        assert_eq!(here(libc::SYS_setsockopt, &[3, 41, 57]), refused);
        assert_eq!(here(libc::SYS_setsockopt, &[3, 1, 4]), ALLOW);
        assert_eq!(here(libc::SYS_ioctl, &[0, 0x5412]), refused);
        assert_eq!(here(libc::SYS_ioctl, &[0, 0x5412 | 1 << 32]), refused);
        assert_eq!(here(libc::SYS_io_uring_setup, &[]), error(libc::ENOSYS));
        assert_eq!(here(libc::SYS_write, &[]), ALLOW);
    }
}
