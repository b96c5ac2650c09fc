//! Where a queue takes a filter of the kernel's.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use crate::filter::ebpf::{self, SocketShape, Wanted};
use crate::sys::bpf::{Counter, Program, ProgramKind};

/// A place for a filter below a queue, with the count of what was dropped there.
#[derive(Debug, Clone)]
pub struct Seat {
    shape: SocketShape,
    counter: Arc<Counter>,
}

/// A filter that the kernel has verified for one queue's seat.
#[derive(Debug)]
pub struct Loaded {
    program: Program,
    shape: SocketShape,
}

impl Seat {
    /// At a packet socket; needs `CAP_BPF` where the kernel lets nobody else use eBPF.
    pub(crate) fn socket(shape: SocketShape) -> io::Result<Self> {
        let counter = Arc::new(Counter::create("vnplug_early")?);
        Ok(Self { shape, counter })
    }

    /// Frames dropped here since the queue was opened.
    pub fn dropped(&self) -> u64 {
        self.counter.sum()
    }

    /// Has the kernel verify a filter that lets through what somebody wants.
    ///
    /// # Errors
    /// Why it does not, as a text.
    pub fn load(&self, wants: &[Wanted]) -> Result<Loaded, String> {
        let code = ebpf::socket_filter(wants, self.shape, &self.counter)
            .map_err(|error| error.to_string())?;
        let program = Program::load(ProgramKind::SocketFilter, "vnplug_early", &code, false)
            .map_err(|error| error.to_string())?;
        Ok(Loaded {
            program,
            shape: self.shape,
        })
    }
}

impl Loaded {
    /// Has it judge what a socket of this shape receives, from now on and instead of any other.
    pub(crate) fn attach(&self, socket: &impl AsFd, shape: SocketShape) -> io::Result<()> {
        if shape != self.shape {
            // An interface that came back as another kind.
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.program.attach_to_socket(socket)
    }
}
