//! Gives up privileges, in two stages, before hostile text meets C code.
//!
//! 1. [`enter_service`], once per process, right after exec. **Should**: keep stdin, stdout and
//!    the right to fork. **Mustn't**: hold other descriptors, any capability, root's files, or a
//!    way to gain them again (`no_new_privs`).
//! 2. [`fork_confined`], once per job. **Should**: read public files (`/etc/services`), write to
//!    one pipe. **Mustn't**: make sockets, so no DNS; start, signal or trace processes; write
//!    files; map new code; outlive its parent or its limits.
#![expect(
    unsafe_code,
    reason = "fork, seccomp and an interval timer have no safe wrapper"
)]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rustix::process::{Gid, Pid, Resource, Rlimit, Signal, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};

use vnplug_bpf::code;

/// The limits of a confined job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Processor time; the job is killed by SIGPROF.
    pub(crate) cpu: Duration,
    /// Address space in bytes.
    pub(crate) memory_bytes: u64,
    /// It may read files: only where [`enter_service`] made the process nobody.
    pub(crate) files: bool,
}

/// Stage 1; the process must be single-threaded and young. Returns whether it is nobody now.
///
/// Only root with `CAP_SETUID` and `CAP_SETGID` can become nobody: the daemon starts the service
/// before it gives its capabilities up. A process that stays somebody owns files, and its jobs
/// must not open any (service and host names do not resolve then, numbers do).
///
/// # Errors
/// The system's, when privileges cannot be given up; the process must then end.
pub(crate) fn enter_service() -> io::Result<bool> {
    single_threaded()?;
    // SAFETY: the process has just been executed and single-threaded, so nothing in it owns a
    // descriptor from 3 on.
    if unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::thread::set_no_new_privs(true)?;
    let nobody = become_nobody();
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none)?;
    for resource in [Resource::Core, Resource::Fsize] {
        limit(resource, 0)?;
    }
    Ok(nobody.is_ok())
}

fn become_nobody() -> rustix::io::Result<()> {
    let (uid, gid) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)
}

/// Stage 2: runs `job` in a forked, confined process and returns its process id.
///
/// The job writes its result to `reply`; the process ends when it returns (exit 0) or panics
/// (exit 101). The caller must reap it.
///
/// # Errors
/// The system's, when there is no fork or this process has threads.
pub(crate) fn fork_confined(
    limits: Limits,
    reply: OwnedFd,
    job: impl FnOnce(OwnedFd),
) -> io::Result<Pid> {
    single_threaded()?;
    let parent = rustix::process::getpid();
    // SAFETY: the process is single-threaded, so no lock is held by a thread the child lacks.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let confined = || confine(limits, parent);
            let done = catch_unwind(AssertUnwindSafe(|| confined().map(|()| job(reply))));
            // SAFETY: ends this process at once, without the destructors that the parent runs.
            unsafe { libc::_exit(if matches!(done, Ok(Ok(()))) { 0 } else { 101 }) }
        }
        pid => Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork returned no process")),
    }
}

fn confine(limits: Limits, parent: Pid) -> io::Result<()> {
    let null = fs::File::open("/dev/null")?;
    for stream in [0, 1] {
        // SAFETY: stdin and stdout belong to the process as a whole; nothing here reads them.
        if unsafe { libc::dup2(null.as_raw_fd(), stream) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() != Some(parent) {
        return Err(io::Error::other("the parent is gone"));
    }
    limit(Resource::As, limits.memory_bytes)?;
    limit(Resource::Nofile, 16)?;
    // The timer has the resolution; the limit in whole seconds stays if the timer is disarmed.
    limit(Resource::Cpu, limits.cpu.as_secs() + 1)?;
    let value = libc::timeval {
        tv_sec: limits.cpu.as_secs().try_into().map_err(io::Error::other)?,
        tv_usec: limits.cpu.subsec_micros().into(),
    };
    let once = libc::itimerval {
        it_interval: libc::timeval {
            tv_sec: 0,
            tv_usec: 0,
        },
        it_value: value,
    };
    // SAFETY: reads one structure of ours, writes nothing.
    if unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const once, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    allow_only_reading(limits.files)
}

/// Installs the system-call filter of stage 2: everything that is not listed gives EACCES.
fn allow_only_reading(files: bool) -> io::Result<()> {
    let step = |code: u16, k: u32, jt: u8, jf: u8| libc::sock_filter { code, jt, jf, k };
    let load = |offset: u32| step(code::LD_W_ABS, offset, 0, 0);
    let allow = step(code::RET, libc::SECCOMP_RET_ALLOW, 0, 0);
    let refuse = step(
        code::RET,
        libc::SECCOMP_RET_ERRNO | libc::EACCES.cast_unsigned(),
        0,
        0,
    );
    let mut list = vec![
        load(DATA_ARCH),
        step(code::JEQ_K, AUDIT_ARCH, 1, 0),
        refuse,
        load(DATA_NUMBER),
    ];
    for number in ALLOWED {
        let number = u32::try_from(*number).map_err(io::Error::other)?;
        list.extend([step(code::JEQ_K, number, 0, 1), allow]);
    }
    for (number, argument, forbidden_bits) in ALLOWED_WITHOUT {
        if *number == libc::SYS_openat && !files {
            continue;
        }
        let number = u32::try_from(*number).map_err(io::Error::other)?;
        list.extend([
            step(code::JEQ_K, number, 0, 4),
            load(DATA_ARGUMENTS + 8 * argument + LOW_HALF),
            step(code::JSET_K, forbidden_bits.cast_unsigned(), 0, 1),
            refuse,
            allow,
        ]);
    }
    list.push(refuse);
    let program = libc::sock_fprog {
        len: list.len().try_into().map_err(io::Error::other)?,
        filter: list.as_mut_ptr(),
    };
    // SAFETY: `program` and the list it points to live through the call, which copies them.
    match unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        )
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let limit = Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    Ok(rustix::process::setrlimit(resource, limit)?)
}

fn single_threaded() -> io::Result<()> {
    match fs::read_dir("/proc/self/task")?.count() {
        1 => Ok(()),
        threads => Err(io::Error::other(format!(
            "this process has {threads} threads, must have 1"
        ))),
    }
}

/// What the C library and libpcap need to allocate, to read public files and to answer.
const ALLOWED: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_exit_group,
];

/// Allowed if an argument (by index) has none of these bits: no writing, no new code.
const ALLOWED_WITHOUT: &[(libc::c_long, u32, i32)] = &[
    (
        libc::SYS_openat,
        2,
        libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC,
    ),
    (libc::SYS_mmap, 2, libc::PROT_EXEC),
    (libc::SYS_mprotect, 2, libc::PROT_EXEC),
];

/// The user and group without files, everywhere on Linux.
const NOBODY: u32 = 65_534;

/// Offsets in `struct seccomp_data`.
const DATA_NUMBER: u32 = 0;
const DATA_ARCH: u32 = 4;
const DATA_ARGUMENTS: u32 = 16;
const LOW_HALF: u32 = if cfg!(target_endian = "big") { 4 } else { 0 };

/// `AUDIT_ARCH_*` of linux/audit.h.
#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xc000_00b7;
#[cfg(target_arch = "riscv64")]
const AUDIT_ARCH: u32 = 0xc000_00f3;

#[cfg(test)]
#[path = "confine_tests.rs"]
mod tests;
