//! Who judges the acts of a program, and who else is told of them.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::act::{Act, Doing, Transport, Who};
use crate::gate::Gate;
use crate::name::Name;

/// Says where an act goes instead.
pub type Detour = Box<dyn Fn(&Act) -> Option<SocketAddr> + Send + Sync>;
/// Is told whose socket with this address of its own took a detour.
pub type Detoured = Box<dyn Fn(&Arc<Who>, Transport, SocketAddr) + Send + Sync>;
/// Is told of an act that was allowed, and of the names that its address had when it was proposed. Who wants to know of the
/// connection that it makes says so; who cannot let its packets pass says why, and it is refused.
pub type Permit = Box<dyn Fn(&Act, &[Name]) -> Result<Option<Begins>, &'static str> + Send + Sync>;

/// Wants to know from which address and port an act that was allowed has made its connection. Dropped untold: it has made none.
pub struct Begins(Option<Box<Begun>>);

type Begun = dyn FnOnce(Option<SocketAddr>) + Send;

/// Who judges, and who else has a say. Made in the supervisor.
pub struct Judging {
    /// Judges.
    pub gate: Gate,
    /// Where a connection or a datagram goes instead of where the program wrote, without being judged: to a name server that
    /// judges names. Must not block.
    pub detour: Option<Detour>,
    /// Told before the program can send anything by that socket.
    pub detoured: Option<Detoured>,
    /// Told before the act is done. Must not block.
    pub permit: Option<Permit>,
}

impl Begins {
    /// Has this called, once.
    pub fn new(begun: impl FnOnce(Option<SocketAddr>) + Send + 'static) -> Self {
        Self(Some(Box::new(begun)))
    }

    /// The connection has begun there, or there is none.
    pub fn tell(mut self, own: Option<SocketAddr>) {
        if let Some(begun) = self.0.take() {
            begun(own);
        }
    }
}

impl Drop for Begins {
    fn drop(&mut self) {
        if let Some(begun) = self.0.take() {
            begun(None);
        }
    }
}

impl fmt::Debug for Begins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Begins").finish_non_exhaustive()
    }
}

impl Judging {
    /// The gate alone.
    pub fn by(gate: Gate) -> Self {
        Self {
            gate,
            detour: None,
            detoured: None,
            permit: None,
        }
    }

    pub(crate) fn detour_of(&self, act: &Act) -> Option<SocketAddr> {
        let detour = self.detour.as_ref()?;
        (act.doing == Doing::Connect).then(|| detour(act)).flatten()
    }
}
