//! What those may have who are no operators.

use vnplug_ring::control::{Open, code};

use super::{Hub, Owner, Programs, Refusal};

/// Limits that the operator sets.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Ports in all.
    pub ports: usize,
    /// Ports of one user that is no operator, or of one VM.
    pub ports_each: usize,
    /// Bytes of rings of one user that is no operator.
    pub user_bytes: u64,
    /// Bytes of a ring's record area when a reader does not say.
    pub ring_bytes: u64,
    /// The most a reader may ask for.
    pub max_ring_bytes: u64,
}

/// Instructions of all filters and rules of one owner, who is no operator, on one source, added up
/// over its queues. Everybody's frames wait while a queue's thread runs one reader's filters.
pub const MAX_FILTER_WORK: usize = 16_384;

impl Hub {
    /// Whether somebody who is no operator may open one more port; all readers share the daemon's
    /// ports and the host's memory. `awaited`: ports that they wait for, and their bytes.
    ///
    /// # Errors
    /// [`Refusal`] that names the limit.
    pub(crate) fn within_limits(
        &self,
        request: &Open,
        owner: &Owner,
        awaited: (usize, u64),
    ) -> Result<(), Refusal> {
        let (source, queue) = self.find(&request.device)?;
        let own = || self.ports.values().filter(|port| port.owner == *owner);
        let most = self.limits.ports_each;
        if own().count() + awaited.0 >= most {
            let what = format!("{most} ports of yours are open, the limit (max_ports_each)");
            return Err(Refusal::new(code::LIMIT, what));
        }
        if matches!(owner, Owner::Vm(_)) {
            return Ok(());
        }
        let queues = queue.map_or(self.sources[source].workers.len(), |_| 1);
        let wanted =
            self.capacity(request, 0)? * queues as u64 + self.transmit_capacity(request)?;
        let has: u64 = own()
            .map(|port| port.capacity * port.queues.len() as u64 + port.transmit)
            .sum::<u64>()
            + awaited.1;
        let most = self.limits.user_bytes;
        if has + wanted > most {
            let what = format!(
                "your rings have {has} bytes and this port needs {wanted}; the limit is {most} \
                 (max_user_bytes)"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        Ok(())
    }

    /// Whether the filters of somebody who is no operator, with this one, are still bearable for the
    /// other readers of the source. `port` is the one whose filter it replaces.
    ///
    /// # Errors
    /// [`Refusal`] that names the limit.
    pub(crate) fn bears(
        &self,
        device: &str,
        port: Option<u32>,
        owner: &Owner,
        programs: &Programs,
    ) -> Result<(), Refusal> {
        let (source, queues) = match port.and_then(|port| self.ports.get(&port)) {
            Some(record) => (record.source, record.queues.len()),
            None => {
                let (source, queue) = self.find(device)?;
                (
                    source,
                    queue.map_or(self.sources[source].workers.len(), |_| 1),
                )
            }
        };
        let others: usize = self
            .ports
            .iter()
            .filter(|(id, record)| {
                Some(**id) != port && record.source == source && record.owner == *owner
            })
            .map(|(_, record)| record.work())
            .sum();
        let rules = port.and_then(|port| self.ports.get(&port));
        let rules = rules.map_or(0, |record| record.rules.work());
        let wanted = (programs.filter_work() + rules) * queues;
        if others + wanted > MAX_FILTER_WORK {
            let what = format!(
                "your filters on this source have {others} instructions and this one {wanted}; \
                 the limit is {MAX_FILTER_WORK}: use shorter filters or fewer ports"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        Ok(())
    }
}
