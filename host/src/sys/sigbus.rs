//! A VM's pool is a file that QEMU or User-mode Linux also opened; whoever truncates it would kill
//! the daemon by SIGBUS at the next store.
//!
//! The handler looks the faulting address up among the guarded mappings, puts private zero pages in
//! place of the whole mapping and sets its [`Watch`]; the daemon then sees `lost` and drops the VM. A
//! SIGBUS anywhere else gets the default action: it is a bug.
//!
//! NB: the whole mapping, not one page: a page of 4 KiB cannot replace a part of a huge one, and a
//! page at a time could run into the limit of mappings (`vm.max_map_count`).
#![expect(unsafe_code, reason = "a signal handler and what it may touch")]

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

use super::memory::Watch;

const SLOTS: usize = 1024;

struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    watch: AtomicPtr<Watch>,
}

static GUARDED: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        watch: AtomicPtr::new(std::ptr::null_mut()),
    }
}; SLOTS];

/// Keeps a mapping guarded; dropped before the memory is unmapped.
pub(crate) struct Guard {
    slot: &'static Slot,
    watch: *const Watch,
}

// SAFETY: the pointer is an owned Arc reference, only given back on drop.
unsafe impl Send for Guard {}
// SAFETY: as above.
unsafe impl Sync for Guard {}

/// Guards `len` bytes at `start`. Beyond 1024 guarded mappings the rest goes unguarded, with a
/// warning.
pub(crate) fn guard(start: usize, len: usize, watch: &Arc<Watch>) -> Guard {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    static NOWHERE: Slot = Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        watch: AtomicPtr::new(std::ptr::null_mut()),
    };
    let watch = Arc::into_raw(Arc::clone(watch));
    for slot in &GUARDED {
        let free = slot
            .start
            .compare_exchange(0, usize::MAX, Ordering::AcqRel, Ordering::Relaxed);
        if free.is_ok() {
            slot.watch.store(watch.cast_mut(), Ordering::Release);
            slot.len.store(len, Ordering::Release);
            slot.start.store(start, Ordering::Release);
            return Guard { slot, watch };
        }
    }
    log::warn!(target: "port", "more than {SLOTS} pools: this one is not guarded against truncation");
    Guard {
        slot: &NOWHERE,
        watch,
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.slot.len.store(0, Ordering::Release);
        self.slot
            .watch
            .store(std::ptr::null_mut(), Ordering::Release);
        self.slot.start.store(0, Ordering::Release);
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
    for slot in &GUARDED {
        let start = slot.start.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Acquire);
        if start == 0 || address < start || address - start >= len {
            continue;
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
        if mapped != libc::MAP_FAILED && !watch.is_null() {
            // SAFETY: the slot's Arc reference keeps it alive while the mapping is in use.
            unsafe { (*watch).lost.store(true, Ordering::Release) };
            return;
        }
    }
    // SAFETY: restores the default action; returning repeats the fault and ends the process.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}
