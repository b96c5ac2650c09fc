//! Shared memory and CPUs.
#![expect(unsafe_code, reason = "maps shared memory, makes TAPs")]

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::process::{Pid, Resource, Rlimit, getpid, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use vnplug_ring::Region;

use crate::row::Result;

/// Shared memory that a child process inherits, of `len` bytes.
pub(crate) fn memory(len: u64) -> Result<OwnedFd> {
    // No CLOEXEC: the other process of the row gets the descriptor by its number.
    let fd = memfd_create("vnplug-bench", MemfdFlags::empty())?;
    ftruncate(&fd, len)?;
    Ok(fd)
}

/// Maps shared memory, with huge pages where the kernel gives them.
pub(crate) fn map(fd: impl AsFd, len: u64) -> Result<Region> {
    struct Mapping(usize, usize);
    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: mapped below with this length; the region that used it is gone. An error
            // leaves the memory mapped, which harms nobody.
            let _ = unsafe { munmap(self.0 as *mut _, self.1) };
        }
    }
    let size = usize::try_from(len)?;
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe { mmap(std::ptr::null_mut(), size, flags, MapFlags::SHARED, fd, 0)? };
    // SAFETY: just mapped; the advice changes no contents. It is refused where huge pages are off.
    let _ = unsafe { madvise(base, size, Advice::LinuxHugepage) };
    let owner = Arc::new(Mapping(base as usize, size));
    let base = NonNull::new(base.cast()).ok_or("mapped at zero")?;
    // SAFETY: `owner` keeps the mapping, page-aligned and of `len` bytes, until the region is gone.
    Ok(unsafe { Region::from_raw(base, len, owner) })
}

/// A TAP of this name, in the namespace of the thread that makes it; it goes with the file. `flags` beside those of
/// every TAP.
pub(crate) fn tap(name: &str, flags: libc::c_int) -> std::io::Result<File> {
    let tap = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: an `ifreq` of zeros is one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(15)) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | flags) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`.
    match unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) } {
        0.. => Ok(tap),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Keeps the calling thread on one CPU.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    pin_to(&[cpu])
}

/// The CPUs that this process may use, as `taskset` left them.
pub(crate) fn cpus() -> &'static [usize] {
    static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
    CPUS.get_or_init(|| match sched_getaffinity(Some(getpid())) {
        Ok(set) => (0..CpuSet::MAX_CPU)
            .filter(|&cpu| set.is_set(cpu))
            .collect(),
        Err(_) => vec![0],
    })
}

/// The nth of them; a machine that has fewer shares.
pub(crate) fn cpu(number: usize) -> usize {
    let all = cpus();
    all.get(number % all.len().max(1)).copied().unwrap_or(0)
}

/// Nanoseconds of processor time that the calling thread has had.
pub(crate) fn thread_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// The processor's count of time stamps: host, and guests of User-mode Linux, read the same one. 0 on
/// processors of other kinds.
pub(crate) fn time_stamp() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: an instruction that every processor of this kind has.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// How many of them a millisecond has, measured once.
pub(crate) fn time_stamps_per_ms() -> u64 {
    static MEASURED: OnceLock<u64> = OnceLock::new();
    *MEASURED.get_or_init(|| {
        let (begin, stamp) = (Instant::now(), time_stamp());
        std::thread::sleep(Duration::from_millis(100));
        let stamps = time_stamp() - stamp;
        u64::try_from(u128::from(stamps) * 1_000_000 / begin.elapsed().as_nanos()).unwrap_or(0)
    })
}

/// Works on all CPUs but the first, which the sender gets; what the work starts inherits them.
pub(crate) fn beside_sender<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let others = match cpus() {
        [_, others @ ..] if !others.is_empty() => others,
        all => all,
    };
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            pin_to(others)
                .and_then(|()| work())
                .map_err(|error| error.to_string())
        });
        Ok(worker.join().map_err(|_| "the row panicked")??)
    })
}

/// Keeps a process of one thread on one CPU.
pub(crate) fn pin_process(pid: u32, cpu: usize) -> Result<()> {
    let pid = Pid::from_raw(pid.cast_signed()).ok_or("no process")?;
    Ok(sched_setaffinity(Some(pid), &set_of(&[cpu]))?)
}

fn pin_to(cpus: &[usize]) -> Result<()> {
    Ok(sched_setaffinity(None, &set_of(cpus))?)
}

fn set_of(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    set
}

/// Gives this thread, and what it starts, the ordinary class and priority, where it was given others.
pub(crate) fn ordinary() -> Result<()> {
    class(libc::SCHED_OTHER, 0)?;
    Ok(rustix::process::setpriority_process(None, 0)?)
}

/// Gives this thread, and what it starts, a real-time class: for who sleeps most of the time.
pub(crate) fn real_time() -> Result<()> {
    class(libc::SCHED_RR, 10)
}

fn class(class: i32, priority: i32) -> Result<()> {
    // SAFETY: the parameters are a plain structure that the kernel copies.
    let status = unsafe {
        let mut parameters: libc::sched_param = std::mem::zeroed();
        parameters.sched_priority = priority;
        libc::sched_setscheduler(0, class, &raw const parameters)
    };
    match status {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().into()),
    }
}

/// Lets this process, and what it starts, open as many files as it may.
pub(crate) fn allow_most_files() -> Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: maximum,
        maximum,
    };
    Ok(setrlimit(Resource::Nofile, most)?)
}

/// Processor time of all children that were waited for, with theirs.
pub(crate) fn children_time() -> Result<Duration> {
    // SAFETY: the kernel fills a plain structure of ours.
    let (status, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let status = libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        (status, usage)
    };
    if status != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    let time = |part: libc::timeval| {
        Duration::from_secs(part.tv_sec as u64) + Duration::from_micros(part.tv_usec as u64)
    };
    Ok(time(usage.ru_utime) + time(usage.ru_stime))
}

/// Makes SIGINT and SIGTERM set a flag instead of ending this process.
pub(crate) fn catch_signals() -> Result<()> {
    extern "C" fn caught(signal: libc::c_int) {
        // Relaxed: a flag that is polled.
        CAUGHT.store(signal, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores a number.
        let status = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = caught as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut())
        };
        if status != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
    }
    Ok(())
}

/// The signal that came, if one did.
pub(crate) fn caught() -> Option<i32> {
    match CAUGHT.load(Ordering::Relaxed) {
        0 => None,
        signal => Some(signal),
    }
}

static CAUGHT: AtomicI32 = AtomicI32::new(0);
