//! Huge pages for one test at a time.

use std::fs::{self, File};
use std::path::Path;

use rustix::fs::flock;

/// More huge pages, for as long as it lives; nobody else changes their number meanwhile.
#[derive(Debug)]
pub struct HugePages {
    before: String,
    _alone: File,
}

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

impl HugePages {
    /// `None`, said aloud, if the kernel has none.
    ///
    /// # Panics
    /// If they cannot be had.
    pub fn reserve(count: u64) -> Option<Self> {
        if !Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").exists() {
            println!("SKIPPED: this kernel has no huge pages of 2 MiB");
            return None;
        }
        let alone = File::create(std::env::temp_dir().join("vnplab-huge-pages.lock"))
            .expect("a file of the kernel's");
        flock(&alone, rustix::fs::FlockOperation::LockExclusive).expect("a file of the kernel's");
        let before = fs::read_to_string(RESERVED).expect("a file of the kernel's");
        let wanted = before
            .trim()
            .parse::<u64>()
            .expect("a file of the kernel's")
            + count;
        fs::write(RESERVED, wanted.to_string()).expect("a file of the kernel's");
        let it = Self {
            before,
            _alone: alone,
        };
        assert!(it.free() >= count, "the kernel has no {count} huge pages");
        Some(it)
    }

    /// How many are free.
    ///
    /// # Panics
    /// If the kernel does not tell.
    #[must_use]
    pub fn free(&self) -> u64 {
        let file = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
        fs::read_to_string(file)
            .expect("a file of the kernel's")
            .trim()
            .parse()
            .expect("a file of the kernel's")
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(RESERVED, &self.before);
    }
}
