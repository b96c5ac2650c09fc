//! Translated programs in executable memory, and the call into them.
//!
//! A [`Code`] keeps the pages alive in which it lies, together with what was translated at the same
//! time: a function takes some hundred bytes, a page 4,096. The pages go when the last program in
//! them goes.
#![expect(unsafe_code, reason = "calls machine code that we generated")]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::budget::Held;
use super::translate::Translated;
use vnplug_os::executable::Executable;
use vnplug_os::prefetch;

/// `fn(bytes, len, wire_len, key) -> verdict`.
type Entry = unsafe extern "C" fn(*const u8, usize, u32, u32) -> u32;

/// One program's way into its machine code.
#[derive(Debug)]
pub(crate) struct Native {
    entry: Entry,
    key: u32,
    /// Keeps the pages.
    _code: Arc<Code>,
    _counted: Held,
}

/// Machine code of one program, shared by all equal programs.
#[derive(Debug)]
pub(super) struct Code {
    entry: Entry,
    key: u32,
    _pages: Arc<Pages>,
    _share: Held,
}

#[derive(Debug)]
struct Pages {
    memory: Executable,
    _spent: Held,
}

impl Native {
    pub(super) fn new(code: Arc<Code>, counted: Held) -> Self {
        Self {
            entry: code.entry,
            key: code.key,
            _code: code,
            _counted: counted,
        }
    }

    /// Prefetches the code into the processor's caches.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        let at = self.entry as *const u8;
        prefetch::address(at);
        prefetch::address(at.wrapping_add(64));
    }

    /// As [`Program::run`](crate::Program::run).
    #[inline(always)]
    pub(crate) fn run(&self, bytes: &[u8], wire_len: u32) -> u32 {
        // SAFETY: `entry` is what the translator made of a verified program: it reads `len` bytes
        // at `bytes` at most, writes nothing but its own stack, and returns. `_code` keeps it.
        unsafe { (self.entry)(bytes.as_ptr(), bytes.len(), wire_len, self.key) }
    }
}

/// Where `len` bytes of functions end if another follows them.
pub(super) fn end_of(len: usize, function: &Translated) -> usize {
    len.next_multiple_of(ALIGNMENT) + function.bytes().len()
}

/// Places functions together in fresh pages; `shares` are the parts that they take of their owners'
/// budgets.
///
/// # Errors
/// The system's; nothing remains allocated.
pub(super) fn place(
    functions: &[Translated],
    shares: Vec<Held>,
    spent: Held,
) -> io::Result<Vec<Arc<Code>>> {
    let (joined, offsets) = join(functions);
    let pages = Arc::new(Pages {
        memory: Executable::new(&joined)?,
        _spent: spent,
    });
    let parts = functions.iter().zip(offsets).zip(shares);
    Ok(parts
        .map(|((function, offset), share)| {
            let address = pages.memory.address(offset);
            Arc::new(Code {
                // SAFETY: a function of this type begins at `offset`: the translator declared it
                // so, and only the translator makes a `Translated`.
                entry: unsafe { std::mem::transmute::<NonNull<u8>, Entry>(address) },
                key: function.key(),
                _pages: Arc::clone(&pages),
                _share: share,
            })
        })
        .collect())
}

/// The functions one after the other, and where each begins.
fn join(functions: &[Translated]) -> (Vec<u8>, Vec<usize>) {
    let mut joined = Vec::new();
    let offsets = functions.iter().map(|function| {
        joined.resize(joined.len().next_multiple_of(ALIGNMENT), INT3);
        let offset = joined.len();
        joined.extend_from_slice(function.bytes());
        offset
    });
    let offsets = offsets.collect();
    (joined, offsets)
}

/// A function begins at a cache line: most take a few of them.
const ALIGNMENT: usize = 64;

/// Between two functions.
const INT3: u8 = 0xcc;
