//! Guards memory that others can reach: a VM's pool is a file that QEMU or User-mode Linux also
//! opened, and a peer that truncates it would kill the daemon by SIGBUS at the next store. All
//! mappings of shared memory are guarded, also those from which no peer is known to be able to take
//! pages.
//!
//! The handler looks the faulting address up among the guarded mappings, puts private zero pages in
//! place of the whole mapping and sets its [`Watch`]; the daemon then sees `lost` and drops the VM. A
//! SIGBUS anywhere else gets the default action: it is a bug.
//!
//! NB: the whole mapping, not one page: a page of 4 KiB cannot replace a part of a huge one, and a
//! page at a time could run into the limit of mappings (`vm.max_map_count`).
#![expect(unsafe_code, reason = "a signal handler and what it may touch")]

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};

use super::memory::Watch;

/// Slots that are made at a time; there is no end of them.
const CHUNK: usize = 256;

struct Guarded {
    start: AtomicUsize,
    len: AtomicUsize,
    watch: AtomicPtr<Watch>,
}

/// A lot of slots, and those that were made before. Never given back: the handler may be at any.
struct Chunk {
    slots: [Guarded; CHUNK],
    next: *const Chunk,
}

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

/// Guards `len` bytes at `start`.
pub fn guard(start: usize, len: usize, watch: &Arc<Watch>) -> Guard {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    let watch = Arc::into_raw(Arc::clone(watch));
    let slot = free_slot();
    slot.watch.store(watch.cast_mut(), Ordering::Release);
    slot.len.store(len, Ordering::Release);
    slot.start.store(start, Ordering::Release);
    Guard { slot, watch }
}

fn free_slot() -> &'static Guarded {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(slot) = free.pop() {
        return slot;
    }
    let made = Box::new(Chunk {
        slots: [const {
            Guarded {
                start: AtomicUsize::new(0),
                len: AtomicUsize::new(0),
                watch: AtomicPtr::new(std::ptr::null_mut()),
            }
        }; CHUNK],
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
        self.slot.len.store(0, Ordering::Release);
        self.slot
            .watch
            .store(std::ptr::null_mut(), Ordering::Release);
        self.slot.start.store(0, Ordering::Release);
        FREE.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(self.slot);
        // SAFETY: the reference taken by Arc::into_raw in `guard`, given back once. The mapping is
        // no longer used (its owner is being dropped), so the handler cannot be inside it.
        drop(unsafe { Arc::from_raw(self.watch) });
    }
}

fn install() {
    // SAFETY: zeroed is a valid sigaction; the handler below is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
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
    let start = slot.start.load(Ordering::Acquire);
    let len = slot.len.load(Ordering::Acquire);
    if start == 0 || address < start || address - start >= len {
        return false;
    }
    // SAFETY: replaces exactly a mapping of ours, which its owner unmaps later with the same
    // length, by private zeroes; mmap is a plain system call.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::with_exposed_provenance_mut(start),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    let watch = slot.watch.load(Ordering::Acquire);
    if mapped == libc::MAP_FAILED || watch.is_null() {
        return false;
    }
    // SAFETY: the slot's Arc reference keeps it alive while the mapping is in use.
    unsafe { (*watch).lost.store(true, Ordering::Release) };
    true
}

#[cfg(test)]
mod tests {
    use super::*;

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
