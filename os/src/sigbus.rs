//! Guards memory that others can reach: a VM's pool is a file that QEMU or User-mode Linux also
//! opened, and a peer that truncates it would kill the daemon by SIGBUS at the next store. All
//! mappings of shared memory are guarded, also those from which no peer is known to be able to take
//! pages.
//!
//! The handler looks the faulting address up among the guarded mappings, puts zero pages in place of
//! the whole mapping and sets its [`Watch`]; the daemon then sees `lost` and drops the VM. A SIGBUS
//! anywhere else gets the default action: it is a bug.
//!
//! The zero pages are a part of a sparse file of ours, which nobody else has. Private ones the kernel
//! would count as committed, all of them: where it commits no more than there is
//! (`vm.overcommit_memory=2`) a guest's memory may be too much, and the daemon would die.
//!
//! NB: the whole mapping, not one page: a page of 4 KiB cannot replace a part of a huge one, and a
//! page at a time could run into the limit of mappings (`vm.max_map_count`).
#![expect(unsafe_code, reason = "a signal handler and what it may touch")]

use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::memory::Watch;

/// Slots that are made at a time; there is no end of them.
const CHUNK: usize = 256;

struct Guarded {
    /// Odd while the others change.
    turn: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    watch: AtomicPtr<Watch>,
}

/// A lot of slots, and those that were made before. Never given back: the handler may be at any.
struct Chunk {
    slots: [Guarded; CHUNK],
    next: *const Chunk,
}

/// The file of zero pages, and how much of it is used.
static ZEROES: AtomicI32 = AtomicI32::new(-1);
static ZEROES_USED: AtomicI64 = AtomicI64::new(0);
/// Its length in bytes, of which next to none are ever allocated.
const ZEROES_LEN: i64 = 1 << 46;

/// The newest chunk.
static GUARDED: AtomicPtr<Chunk> = AtomicPtr::new(std::ptr::null_mut());
/// Slots that guard nothing. The handler does not look here.
static FREE: Mutex<Vec<&'static Guarded>> = Mutex::new(Vec::new());

/// Keeps a mapping guarded; dropped before the memory is unmapped.
pub struct Guard {
    slot: &'static Guarded,
    watch: *const Watch,
}

// SAFETY: the pointer is an owned Arc reference, only given back on drop.
unsafe impl Send for Guard {}
// SAFETY: as above.
unsafe impl Sync for Guard {}

/// Prepares what the handler needs, one descriptor. Else the first guard does.
pub fn prepare() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
}

/// Guards `len` bytes at `start`.
pub fn guard(start: usize, len: usize, watch: &Arc<Watch>) -> Guard {
    prepare();
    let watch = Arc::into_raw(Arc::clone(watch));
    let slot = free_slot();
    slot.set(start, len, watch.cast_mut());
    Guard { slot, watch }
}

impl Guarded {
    const fn new() -> Self {
        Self {
            turn: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            watch: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Only who has the slot calls this.
    fn set(&self, start: usize, len: usize, watch: *mut Watch) {
        // SeqCst throughout: not a path that has to be fast, and a handler may look at any moment.
        self.turn.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.len.store(len, Ordering::SeqCst);
        self.watch.store(watch, Ordering::SeqCst);
        self.turn.fetch_add(1, Ordering::SeqCst);
    }

    /// Where the mapping begins, its length, and its watch, which belong together; `None` while they
    /// change. That of a mapping in use does not.
    fn get(&self) -> Option<(usize, usize, *mut Watch)> {
        let turn = self.turn.load(Ordering::SeqCst);
        let start = self.start.load(Ordering::SeqCst);
        let len = self.len.load(Ordering::SeqCst);
        let watch = self.watch.load(Ordering::SeqCst);
        let is_one = turn.is_multiple_of(2) && turn == self.turn.load(Ordering::SeqCst);
        is_one.then_some((start, len, watch))
    }
}

fn free_slot() -> &'static Guarded {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(slot) = free.pop() {
        return slot;
    }
    let made = Box::new(Chunk {
        slots: [const { Guarded::new() }; CHUNK],
        next: GUARDED.load(Ordering::Acquire),
    });
    let chunk: &'static Chunk = Box::leak(made);
    // Release: pairs with the Acquire in the handler; only who holds the lock stores here.
    GUARDED.store(std::ptr::from_ref(chunk).cast_mut(), Ordering::Release);
    let (first, others) = chunk.slots.split_first().expect("a chunk has slots");
    free.extend(others);
    first
}

impl Drop for Guard {
    fn drop(&mut self) {
        // SAFETY: the Arc reference of the slot, which is ours.
        if unsafe { (*self.watch).lost.load(Ordering::Acquire) }
            && let Some((start, len, _)) = self.slot.get()
        {
            // What was written to the zero pages goes with them. Where it is no such mapping the kernel
            // refuses.
            // SAFETY: a mapping of ours that nobody uses any more.
            unsafe {
                let start = std::ptr::with_exposed_provenance_mut(start);
                libc::madvise(start, len, libc::MADV_REMOVE);
            }
        }
        self.slot.set(0, 0, std::ptr::null_mut());
        FREE.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(self.slot);
        // SAFETY: the reference taken by Arc::into_raw in `guard`, given back once. The mapping is
        // no longer used (its owner is being dropped), so the handler cannot be inside it.
        drop(unsafe { Arc::from_raw(self.watch) });
    }
}

fn install() {
    match zeroes() {
        Ok(file) => ZEROES.store(file.into_raw_fd(), Ordering::SeqCst),
        Err(error) => log::warn!(target: "control", "no file of zero pages: {error}"),
    }
    // SAFETY: zeroed is a valid sigaction; the handler below is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}

/// A sparse file of zero pages.
fn zeroes() -> std::io::Result<OwnedFd> {
    let file = memfd_create("vnplug-zeroes", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, ZEROES_LEN as u64)?;
    Ok(file)
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() }.addr();
    // Acquire: pairs with the Release in `free_slot`.
    let mut chunk: *const Chunk = GUARDED.load(Ordering::Acquire);
    // SAFETY: chunks are whole when they are told of, and never given back.
    while let Some(it) = unsafe { chunk.as_ref() } {
        if it.slots.iter().any(|slot| replaced(slot, address)) {
            return;
        }
        chunk = it.next;
    }
    // SAFETY: restores the default action; returning repeats the fault and ends the process.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Replaces the mapping that a slot guards by zero pages, if the address lies in it.
fn replaced(slot: &Guarded, address: usize) -> bool {
    let Some((start, len, watch)) = slot.get() else {
        return false;
    };
    if start == 0 || address < start || address - start >= len {
        return false;
    }
    let zeroes = ZEROES.load(Ordering::SeqCst);
    let at = match zeroes {
        -1 => 0,
        _ => {
            // Pages that no other mapping has, in whole huge pages.
            let bytes = len.next_multiple_of(1 << 21) as i64;
            ZEROES_USED.fetch_add(bytes, Ordering::SeqCst) % (ZEROES_LEN / 2)
        }
    };
    let kind = match zeroes {
        -1 => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        _ => libc::MAP_SHARED,
    };
    // SAFETY: replaces exactly a mapping of ours, which its owner unmaps later with the same
    // length, by zeroes; mmap is a plain system call.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::with_exposed_provenance_mut(start),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            kind | libc::MAP_FIXED,
            zeroes,
            at,
        )
    };
    if mapped == libc::MAP_FAILED || watch.is_null() {
        return false;
    }
    // SAFETY: the slot's Arc reference keeps it alive while the mapping is in use.
    unsafe { (*watch).lost.store(true, Ordering::Release) };
    true
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, BorrowedFd};

    use rustix::fs::{SeekFrom, seek};

    use super::*;

    #[test]
    fn what_takes_a_lost_mappings_place_is_zero_and_counts_as_nothing_committed() {
        // Where in the file of zero pages a mapping lies.
        let place = |base: *mut u8| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let begins = format!("{:x}-", base.addr());
            let line = maps.lines().find(|line| line.starts_with(&begins)).unwrap();
            assert!(
                line.contains("rw-s") && line.contains("vnplug-zeroes"),
                "{line}"
            );
            u64::from_str_radix(line.split(' ').nth(2).unwrap(), 16).unwrap()
        };
        let [one, two] = [4, 3].map(|pages: usize| {
            let file = memfd_create("lost", MemfdFlags::CLOEXEC).unwrap();
            let len = pages << 12;
            ftruncate(&file, len as u64).unwrap();
            let watch = Arc::new(Watch::default());
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            let base = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED,
                    file.as_raw_fd(),
                    0,
                )
            };
            let guard = guard(base.expose_provenance(), len, &watch);
            ftruncate(&file, 0).unwrap();
            (base.cast::<u8>(), len, watch, guard)
        });
        for (base, len, watch, _) in [&one, &two] {
            assert!(!watch.lost.load(Ordering::Acquire));
            for at in (0..*len).step_by(4096) {
                // SAFETY: mapped, by whatever it is.
                unsafe {
                    assert_eq!(base.add(at).read_volatile(), 0);
                    base.add(at).write_volatile(7);
                    assert_eq!(base.add(at).read_volatile(), 7);
                }
            }
            assert!(watch.lost.load(Ordering::Acquire));
        }
        // SAFETY: it stays open.
        let file = unsafe { BorrowedFd::borrow_raw(ZEROES.load(Ordering::SeqCst)) };
        let has_data = |at: u64, len: usize| {
            seek(file, SeekFrom::Data(at)).is_ok_and(|found| found < at + len as u64)
        };
        for (base, len, _, guard) in [one, two] {
            let at = place(base);
            assert!(has_data(at, len));
            drop(guard);
            assert!(
                !has_data(at, len),
                "nothing stays of what was written there"
            );
            // SAFETY: mapped above.
            unsafe { libc::munmap(base.cast(), len) };
        }
    }

    #[test]
    fn there_is_no_last_guard() {
        let watch = Arc::new(Watch::default());
        // Addresses that nobody maps; none is touched.
        let guards: Vec<Guard> = (1..=3_000)
            .map(|at| guard(at << 12, 4096, &watch))
            .collect();
        assert_eq!(Arc::strong_count(&watch), 3_001);
        let starts: std::collections::HashSet<usize> = guards
            .iter()
            .map(|guard| guard.slot.start.load(Ordering::Relaxed))
            .collect();
        assert_eq!(starts.len(), 3_000);
        drop(guards);
        assert_eq!(Arc::strong_count(&watch), 1);
        assert!(FREE.lock().unwrap().len() >= 3_000);
    }
}
