//! Clusters: ports that share a source's frames among them.

use vnplug_ring::control::Balance;

use super::{Hub, Named, Peer};
use vnplug_path::port::Share;

/// What was named, owner, name. A cluster belongs to who made it: nobody can join
/// another's and take a share of its frames. Its members read the same queues, or frames of a queue
/// that one of them does not read would be nobody's.
pub(super) type ClusterKey = (Named, Peer, String);

pub(super) struct Cluster {
    number: u32,
    pub(super) balance: Balance,
    pub(super) members: Vec<u32>,
}

impl Hub {
    pub(super) fn join(
        &mut self,
        key: Option<&ClusterKey>,
        id: u32,
        balance: Balance,
    ) -> (Share, Vec<(u32, Share)>) {
        let Some(key) = key else {
            return (Share::All, Vec::new());
        };
        let number = self.next_cluster;
        let cluster = self.clusters.entry(key.clone()).or_insert_with(|| {
            self.next_cluster += 1;
            Cluster {
                number,
                balance,
                members: Vec::new(),
            }
        });
        cluster.members.push(id);
        let shares = cluster.shares();
        let own = shares.last().map_or(Share::All, |(_, share)| *share);
        (own, shares)
    }

    pub(super) fn leave(&mut self, key: Option<&ClusterKey>, id: u32) -> Vec<(u32, Share)> {
        let Some((key, cluster)) = key.and_then(|key| Some((key, self.clusters.get_mut(key)?)))
        else {
            return Vec::new();
        };
        cluster.members.retain(|member| *member != id);
        let shares = cluster.shares();
        if cluster.members.is_empty() {
            self.clusters.remove(key);
        }
        shares
    }
}

impl Cluster {
    fn shares(&self) -> Vec<(u32, Share)> {
        let of = self.members.len() as u32;
        let share = |index| Share::Member {
            cluster: self.number,
            index,
            of,
            balance: self.balance,
        };
        self.members
            .iter()
            .zip(0..)
            .map(|(&id, index)| (id, share(index)))
            .collect()
    }
}
