//! Who judges the acts of a program, and who else is told of them.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::act::{Act, Doing, Transport, Who};
use crate::gate::Gate;
use crate::name::Name;

/// Says where an act goes instead.
pub type Detour = Box<dyn Fn(&Act) -> Option<SocketAddr> + Send + Sync>;
/// Is told whose socket with this address of its own took a detour.
pub type Detoured = Box<dyn Fn(&Arc<Who>, Transport, SocketAddr) + Send + Sync>;
/// Is told of an act that was allowed, and of the names that its address had when it was proposed.
pub type Permit = Box<dyn Fn(&Act, &[Name]) + Send + Sync>;

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
