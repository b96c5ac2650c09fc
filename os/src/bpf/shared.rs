//! [`Array`]s that the daemon reads and writes itself, and that may outlive it.
//!
//! No system call moves a value: what one side writes the other side's next load has. Reading and writing needs
//! no capability. Memory is committed when the array is made.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use vnplug_ring::Region;

use super::pin::{pin, pinned};
use super::{Array, MMAPABLE, Map, MapKind, map_shape};
use crate::memory;

/// An array, mapped.
#[derive(Debug)]
pub struct Shared {
    array: Array,
    region: Region,
}

/// How large an array is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of an entry, a multiple of 8.
    pub entry_bytes: u32,
    /// Entries.
    pub entries: u32,
}

impl Shape {
    fn bytes(self) -> u64 {
        let page = rustix::param::page_size() as u64;
        (u64::from(self.entry_bytes) * u64::from(self.entries)).next_multiple_of(page)
    }
}

impl Shared {
    /// Makes one of zeroes.
    ///
    /// # Errors
    /// The system's; `EPERM` without `CAP_BPF`.
    pub fn create(name: &str, shape: Shape) -> io::Result<Self> {
        let array = Array::create(name, shape.entry_bytes, shape.entries, false)?;
        Self::of(array, shape)
    }

    /// The one that has this name in a bpf filesystem.
    ///
    /// # Errors
    /// `NotFound` if there is none, `InvalidData` if it is of another kind or shape.
    pub fn open(path: &Path, shape: Shape) -> io::Result<Self> {
        let fd = pinned(path)?;
        let is = map_shape(&fd)?;
        let want = [
            MapKind::Array as u32,
            4,
            shape.entry_bytes,
            shape.entries,
            MMAPABLE,
        ];
        if is != want {
            let what = format!("{} is another kind of map", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let map = Map {
            fd,
            key_bytes: 4,
            value_bytes: shape.entry_bytes as usize,
        };
        Self::of(Array::of(map, shape.entries), shape)
    }

    fn of(array: Array, shape: Shape) -> io::Result<Self> {
        let region = memory::mapped(&array, shape.bytes())?;
        Ok(Self { array, region })
    }

    /// Gives it a name, under which it stays when the daemon ends in whatever way.
    ///
    /// # Errors
    /// `EEXIST` if the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.map().fd, path)
    }

    /// The map, for programs.
    pub fn map(&self) -> &Map {
        self.array.map()
    }

    /// The array, for who maps it at another place.
    pub fn array(&self) -> &Array {
        &self.array
    }

    /// Its memory: entries lie one behind the other.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// A word, read once; nothing else depends on it.
    #[inline]
    pub fn read(&self, at: u64) -> u64 {
        // Relaxed: as said.
        self.region.load_u64(at, Ordering::Relaxed)
    }

    /// Writes a word; programs see it some time after.
    #[inline]
    pub fn write(&self, at: u64, value: u64) {
        // Relaxed: a program that must see several words together reads them by a sequence.
        self.region.store_u64(at, value, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bpf::asm::{Alu, Cond};
    use crate::bpf::asm::{Asm, FP, Operand, R0, R1, R2, R3, Size};
    use crate::bpf::{Program, ProgramKind};

    const SHAPE: Shape = Shape {
        entry_bytes: 32,
        entries: 64,
    };

    /// Adds 5 to the second word of entry 3, and puts 7 into its third if that is 0.
    fn program(shared: &Shared) -> Program {
        let mut asm = Asm::default();
        let end = asm.label();
        asm.store_k(Size::Word, FP, -4, 3);
        asm.map(R1, shared.map());
        asm.alu64(Alu::Mov, R2, Operand::X(FP));
        asm.alu64(Alu::Add, R2, Operand::K(4_u32.wrapping_neg()));
        asm.call(1);
        asm.jump_if(Cond::Eq, R0, Operand::K(0), end);
        asm.alu64(Alu::Mov, R1, Operand::X(R0));
        asm.alu64(Alu::Mov, R2, Operand::K(5));
        asm.atomic_add_at(R1, 8, R2);
        asm.alu64(Alu::Mov, R0, Operand::K(0));
        asm.alu64(Alu::Mov, R3, Operand::K(7));
        asm.compare_exchange(R1, 16, R3);
        asm.bind(end);
        asm.alu64(Alu::Mov, R0, Operand::K(2));
        asm.exit();
        let code = asm.finish().unwrap();
        Program::load(ProgramKind::Classifier, "shared", &code, false).unwrap()
    }

    /// Root's, where the kernel lets nobody else use eBPF.
    fn is_permitted() -> bool {
        rustix::process::geteuid().is_root()
    }

    #[test]
    fn what_a_program_writes_is_here_and_back() {
        if !is_permitted() {
            return;
        }
        let shared = Shared::create("shared", SHAPE).unwrap();
        let program = program(&shared);
        let entry = 3 * 32;
        shared.write(entry + 8, 100);
        assert_eq!(program.test(&[0; 64]).unwrap(), 2);
        assert_eq!((shared.read(entry + 8), shared.read(entry + 16)), (105, 7));
        shared.write(entry + 16, 9);
        program.test_repeatedly(&[0; 64], 1000).unwrap();
        assert_eq!((shared.read(entry + 8), shared.read(entry + 16)), (5105, 9));
        // Its neighbours are nobody's business.
        let others = (0..64_u64).filter(|it| *it != 3);
        assert!(
            others
                .flat_map(|it| (0..4).map(move |word| it * 32 + word * 8))
                .all(|at| shared.read(at) == 0)
        );
    }

    #[test]
    fn a_directory_on_another_filesystem_is_none_for_names() {
        assert!(!super::super::is_bpffs(Path::new("/proc")).unwrap());
        assert!(super::super::is_bpffs(Path::new("/no/such/directory")).is_err());
    }
}
