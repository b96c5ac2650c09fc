//! System calls as an attacker makes them.
#![expect(
    unsafe_code,
    reason = "a program that tries to get past the sandbox makes calls with arguments that change"
)]

use std::io;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

/// Memory that threads and processes share: the arguments of calls, at fixed places.
#[derive(Clone, Copy)]
pub(crate) struct Arena(*mut u8);

// SAFETY: the memory lives for ever, and what changes in it is atomic.
unsafe impl Send for Arena {}
// SAFETY: as for Send.
unsafe impl Sync for Arena {}

/// Places in an arena.
pub(crate) const ADDRESS: usize = 0;
pub(crate) const GOOD: usize = 64;
pub(crate) const BAD: usize = 128;
pub(crate) const HEADER: usize = 4096;
pub(crate) const PATH: usize = 6144;
const PART: usize = 512;
const DATA: usize = 2048;
pub(crate) const LENGTH: usize = 8192;

impl Arena {
    /// With the two addresses, and a message to the first place.
    pub(crate) fn new(good: u16, bad: u16) -> Self {
        // SAFETY: a new mapping.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                LENGTH,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        let arena = Self(base.cast());
        for (at, port) in [(ADDRESS, good), (GOOD, good), (BAD, bad)] {
            arena.put_address(at, port);
        }
        // SAFETY: the places lie inside the mapping and are aligned for what is written there.
        unsafe {
            let part: *mut libc::iovec = arena.0.add(PART).cast();
            part.write(libc::iovec {
                iov_base: arena.0.add(DATA).cast(),
                iov_len: 8,
            });
        }
        arena.put_header(ADDRESS);
        arena
    }

    fn put_address(&self, at: usize, port: u16) {
        // SAFETY: inside the mapping, and aligned.
        unsafe {
            let mut address: libc::sockaddr_in = std::mem::zeroed();
            address.sin_family = libc::AF_INET as u16;
            address.sin_port = port.to_be();
            address.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
            self.0.add(at).cast::<libc::sockaddr_in>().write(address);
        }
    }

    /// A message (also as the first entry of sendmmsg) whose address lies at this place.
    pub(crate) fn put_header(&self, name: usize) {
        // SAFETY: inside the mapping, and aligned.
        unsafe {
            let mut header: libc::mmsghdr = std::mem::zeroed();
            header.msg_hdr.msg_name = self.0.add(name).cast();
            header.msg_hdr.msg_namelen = 16;
            header.msg_hdr.msg_iov = self.0.add(PART).cast();
            header.msg_hdr.msg_iovlen = 1;
            self.0.add(HEADER).cast::<libc::mmsghdr>().write(header);
        }
    }

    /// The port of the address at the first place.
    pub(crate) fn port(&self) -> &AtomicU16 {
        // SAFETY: inside the mapping, and aligned.
        unsafe { &*self.0.add(ADDRESS + 2).cast() }
    }

    /// Where the message says its address lies.
    pub(crate) fn name(&self) -> &AtomicU64 {
        // SAFETY: inside the mapping, and aligned: `msg_name` comes first.
        unsafe { &*self.0.add(HEADER).cast() }
    }

    /// A path of less than 2,048 bytes.
    pub(crate) fn put_path(&self, path: &[u8]) {
        for (at, byte) in path.iter().chain(&[0]).enumerate() {
            self.byte(PATH + at).store(*byte, Ordering::Relaxed);
        }
    }

    pub(crate) fn byte(&self, place: usize) -> &AtomicU8 {
        assert!(place < LENGTH);
        // SAFETY: inside the mapping.
        unsafe { &*self.0.add(place).cast() }
    }

    pub(crate) fn at(&self, place: usize) -> u64 {
        self.0 as u64 + place as u64
    }

    pub(crate) fn put_data(&self, number: u64) {
        // SAFETY: inside the mapping, and aligned.
        unsafe { (*self.0.add(DATA).cast::<AtomicU64>()).store(number, Ordering::Relaxed) };
    }

    /// Takes the page with the message away, or brings it back with the message to the first place.
    pub(crate) fn map_header(&self, is_there: bool) {
        // SAFETY: the page is only used by system calls while this goes on.
        unsafe {
            let page = self.0.add(HEADER).cast();
            if is_there {
                let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                let access = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(page, 4096, access, flags, -1, 0);
                self.put_header(ADDRESS);
            } else {
                libc::munmap(page, 4096);
            }
        }
    }
}

/// A system call; its result, or the negative number of an error.
pub(crate) fn call(number: libc::c_long, arguments: [u64; 6]) -> i64 {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: what the arguments point to is an arena, or memory that the caller keeps.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result < 0 {
        -i64::from(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    } else {
        result
    }
}

/// Forks; true in the child.
pub(crate) fn fork() -> i32 {
    // SAFETY: the child only makes system calls and ends.
    unsafe { libc::fork() }
}

/// Ends a process and waits for it.
pub(crate) fn end(pid: i32) {
    // SAFETY: the calls take numbers and write one.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
}

/// How a child ended: its wait status.
pub(crate) fn status_of(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the call writes one number.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    status
}

/// Ends this process with what a call returned, without anything else.
pub(crate) fn leave(code: i32) -> ! {
    // SAFETY: the process ends.
    unsafe { libc::_exit(code) }
}

/// A handler that does nothing, with the flag to restart calls.
pub(crate) fn handle(signal: i32) {
    extern "C" fn nothing(_: i32) {}
    // SAFETY: the handler touches nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}

/// connect by the 32-bit entrance of the kernel.
#[cfg(target_arch = "x86_64")]
pub(crate) fn by_old_entrance(number: u32) -> i32 {
    let result: i32;
    // SAFETY: getpid of the 32-bit table takes no memory.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("eax") number as i32 => result);
    }
    result
}

/// A filter of system calls for this process: one that hands `numbers` over if `hands_over`, else one that allows all.
/// Returns the listener or the negative number of an error.
pub(crate) fn filter(numbers: &[libc::c_long], hands_over: bool) -> i64 {
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let mut code = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for number in numbers {
        code.push(step(libc::BPF_JMP | libc::BPF_JEQ, 0, 1, *number as u32));
        code.push(step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_USER_NOTIF));
    }
    code.push(step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: code.len() as u16,
        filter: code.as_mut_ptr(),
    };
    let flags = if hands_over {
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER
    } else {
        0
    };
    // SAFETY: the calls take numbers; the second reads the program.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    let pointer = &raw const program as u64;
    call(
        libc::SYS_seccomp,
        [
            u64::from(libc::SECCOMP_SET_MODE_FILTER),
            flags,
            pointer,
            0,
            0,
            0,
        ],
    )
}

/// A request to a listener with one structure.
pub(crate) fn request<T>(listener: i32, request: libc::Ioctl, structure: &mut T) -> bool {
    // SAFETY: the structure is the one of the request.
    unsafe { libc::ioctl(listener, request, std::ptr::from_mut(structure)) == 0 }
}

/// A request to a listener with a number.
pub(crate) fn value(listener: i32, request: libc::Ioctl, value: u64) -> bool {
    // SAFETY: the request takes the number itself, and touches no memory.
    unsafe { libc::ioctl(listener, request, value) == 0 }
}

/// A zeroed structure of integers.
pub(crate) fn zeroed<T: Copy>() -> T {
    // SAFETY: only used for the kernel's structures of integers and pointers.
    unsafe { std::mem::zeroed() }
}

/// Copies memory of another process.
pub(crate) fn peek(pid: u32, at: u64, into: &mut [u8]) -> bool {
    let here = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    let there = libc::iovec {
        iov_base: at as *mut libc::c_void,
        iov_len: into.len(),
    };
    // SAFETY: `here` is ours.
    let length =
        unsafe { libc::process_vm_readv(pid as i32, &raw const here, 1, &raw const there, 1, 0) };
    length == into.len() as isize
}

/// Nanoseconds since boot.
pub(crate) fn now_ns() -> u64 {
    let mut time: libc::timespec = zeroed();
    // SAFETY: the call writes one structure.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
