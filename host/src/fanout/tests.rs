//! The sums close whatever comes and goes.

use vnplug_ring::Producer;
use vnplug_ring::Region;
use vnplug_ring::control::Balance;
use vnplug_ring::layout::{Geometry, ring_size};

use super::Fanout;
use crate::port::doorbell::Doorbell;
use crate::port::{Port, PortCounters, Share};
use crate::source::Frame;

fn port(id: u32) -> Port {
    let capacity = 1 << 14;
    let region = Region::heap(ring_size(capacity));
    let geometry = Geometry {
        capacity,
        snaplen: 128,
        link_type: 1,
        epoch: 256,
        port: id,
        queue: 0,
    };
    Port::new(
        id,
        Producer::create(region, geometry).unwrap(),
        Doorbell::Silent,
    )
}

fn offered(fanout: &Fanout) -> u64 {
    let mut sum = PortCounters::default();
    sum.add(&fanout.counters().departed);
    for port in fanout.ports() {
        assert_eq!(port.counters.offered, port.counters.accounted());
        sum.add(&port.counters);
    }
    sum.offered
}

#[test]
fn duties_equal_offers_through_churn_of_ports_and_clusters() {
    let mut fanout = Fanout::new(0, 0);
    let bytes = [5; 60];
    let frame = Frame {
        bytes: &bytes,
        wire_len: 60,
        ts_ns: 0,
        flags: 0,
        vlan_tci: 0,
    };
    let frames = vec![frame; 256];
    let mut members: Vec<u32> = Vec::new();
    let mut state = 7_u64;
    for id in 0..2_000_u32 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        match state >> 61 {
            0 | 1 => fanout.attach(port(id)),
            2 | 3 => {
                fanout.attach(port(id));
                members.push(id);
            }
            4 | 5 => {
                let ids: Vec<u32> = fanout.ports().iter().map(|port| port.id).collect();
                if let Some(&gone) = ids.get((state >> 32) as usize % ids.len().max(1)) {
                    fanout.detach(gone);
                    members.retain(|member| *member != gone);
                }
            }
            _ => {}
        }
        let of = members.len() as u32;
        let shares: Vec<(u32, Share)> = members
            .iter()
            .zip(0..)
            .map(|(&id, index)| {
                (
                    id,
                    Share::Member {
                        cluster: 1,
                        index,
                        of,
                        balance: Balance::RoundRobin,
                    },
                )
            })
            .collect();
        fanout.reshare(&shares);
        fanout.deliver(&frames[..(state >> 40) as usize % 257], u64::from(id));
        assert_eq!(fanout.counters().duties, offered(&fanout), "round {id}");
    }
    assert!(fanout.counters().duties > 1_000_000);
}
