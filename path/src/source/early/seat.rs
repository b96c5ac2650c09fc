//! Where a queue takes a filter of the kernel's.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use crate::source::af_xdp::{ProgramPlan, Programs};
use vnplug_filter::ebpf;
use vnplug_filter::ebpf::{Book, Gate, SocketShape, Wanted};
use vnplug_os::bpf::{Program, ProgramKind};

/// A place for a filter below a queue.
#[derive(Debug, Clone)]
pub struct Seat(Kind);

#[derive(Debug, Clone)]
enum Kind {
    /// At a queue's packet socket, with what its filters and the daemon share.
    Socket(SocketShape, Arc<Book>),
    /// At an interface, below all its queues.
    Xdp(Arc<ProgramPlan>),
}

/// A filter that the kernel has verified for one seat.
#[derive(Debug)]
pub enum Loaded {
    /// For a packet socket.
    #[expect(private_interfaces, reason = "only made and used in the daemon")]
    Socket(SocketFilter),
    /// For an interface.
    #[expect(private_interfaces, reason = "only made and used in the daemon")]
    Xdp(Box<Programs>),
}

/// A packet socket's filter.
#[derive(Debug)]
pub(crate) struct SocketFilter {
    program: Program,
    shape: SocketShape,
}

/// Where seats at packet sockets are made: by whoever opens them, while the process may; later by a thread that may.
#[derive(Clone, Default)]
pub struct SeatOffice(Arc<OnceLock<Box<Clerk>>>);

type Clerk = dyn Fn(SocketShape) -> io::Result<Seat> + Send + Sync;

impl SeatOffice {
    /// From now on they are made so.
    pub fn move_to(&self, clerk: impl Fn(SocketShape) -> io::Result<Seat> + Send + Sync + 'static) {
        // Once.
        let _ = self.0.set(Box::new(clerk));
    }

    /// Makes one. The calling thread waits, and is none that others wait for.
    pub(crate) fn socket(&self, shape: SocketShape) -> io::Result<Seat> {
        match self.0.get() {
            Some(clerk) => clerk(shape),
            None => Seat::socket(shape),
        }
    }
}

impl std::fmt::Debug for SeatOffice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SeatOffice").finish_non_exhaustive()
    }
}

impl PartialEq for SeatOffice {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for SeatOffice {}

impl Seat {
    /// At a packet socket; needs `CAP_BPF` where the kernel lets nobody else use eBPF.
    pub(crate) fn socket(shape: SocketShape) -> io::Result<Self> {
        let book = Arc::new(Book::of_processors("vnplug_early")?);
        Ok(Self(Kind::Socket(shape, book)))
    }

    /// At an interface's XDP hook.
    pub(crate) fn xdp(plan: Arc<ProgramPlan>) -> Self {
        Self(Kind::Xdp(plan))
    }

    /// Whether it is one for all queues of its source.
    pub fn is_shared(&self) -> bool {
        matches!(self.0, Kind::Xdp(_))
    }

    /// Frames dropped at a packet socket since the queue was opened.
    pub(crate) fn dropped(&self) -> u64 {
        match &self.0 {
            Kind::Socket(_, book) => book.all_dropped(),
            Kind::Xdp(_) => 0,
        }
    }

    /// From now on these filters are on in a program that was made for this generation, bit n for filter n; any
    /// other program passes everything.
    pub fn set(&self, generation: u32, on: u64) {
        let book = match &self.0 {
            Kind::Socket(_, book) => Some(&**book),
            Kind::Xdp(plan) => plan.book(),
        };
        if let Some(book) = book {
            book.set(generation, on);
        }
    }

    /// Makes the kernel verify a filter that passes what some port wants, as far as it is [`set`](Self::set) for
    /// this generation. At an interface this needs `CAP_NET_ADMIN` too.
    ///
    /// # Errors
    /// Why it does not, as a text.
    pub fn load(&self, generation: u32, wants: &[Wanted]) -> Result<Loaded, String> {
        match &self.0 {
            Kind::Socket(shape, book) => {
                let gate = Gate { book, generation };
                let code =
                    ebpf::socket_filter(wants, *shape, gate).map_err(|error| error.to_string())?;
                let program =
                    Program::load(ProgramKind::SocketFilter, "vnplug_early", &code, false)
                        .map_err(|error| error.to_string())?;
                Ok(Loaded::Socket(SocketFilter {
                    program,
                    shape: *shape,
                }))
            }
            Kind::Xdp(plan) => match plan.load(Some((wants, generation))) {
                Ok(programs) => Ok(Loaded::Xdp(Box::new(programs))),
                Err(error) => Err(error.to_string()),
            },
        }
    }
}

impl Loaded {
    /// Makes it the filter of a socket of this shape, from now on and instead of any other.
    pub(crate) fn attach(&self, socket: &impl AsFd, shape: SocketShape) -> io::Result<()> {
        match self {
            Self::Socket(filter) if filter.shape == shape => {
                filter.program.attach_to_socket(socket)
            }
            // An interface that came back as another kind.
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}
