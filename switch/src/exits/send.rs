//! Ports are given what there is for them: now, or when it has arrived on a slow wire.

use rustix::event::epoll::{self, EventData, EventFlags};
use vnplug_frame::aggregate::{Aggregator, Limits, Outcome, Single};

use super::Exits;
use super::due::{Due, Form, Item, pieces_of};
use crate::batch::Entered;
use crate::counts::Counters;
use crate::forward::Number;
use crate::link::Given;

impl Exits {
    /// Gives each port what was noted for it of these frames, now.
    pub(crate) fn send(&mut self, entered: &[Entered<'_>], counters: &mut Counters, now_us: u64) {
        while let Some(number) = self.touched.pop() {
            let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
                continue;
            };
            // Nothing is merged of a single frame, and it says nothing of others.
            let is_batch = port.todo.len() > 1;
            let limits = port.limits().filter(|_| is_batch);
            if is_batch {
                port.glance.came();
            }
            let Some(link) = &mut port.link else {
                continue;
            };
            let due = Due {
                todo: &port.todo,
                entered,
                pieces: &self.pieces,
                edits: &self.edits,
                aggregator: None,
            };
            if port.is_slow {
                let (given, lost) = self.emulation.put(number, due, now_us);
                port.done();
                port.counters.gave(given, counters);
                counters.dropped_loss += lost;
                port.counters.out_lost += lost;
                continue;
            }
            let given = match limits {
                None => link.send(due),
                Some(limits) => {
                    let all = (&mut self.aggregator, &mut self.merged);
                    let (gone, made) = merge(all, &limits, due);
                    port.counters.were_merged(gone, made, counters);
                    port.glance.looked(port.todo.len(), gone);
                    link.send(Due {
                        todo: &self.merged,
                        entered,
                        pieces: &self.pieces,
                        edits: &self.edits,
                        aggregator: Some(&self.aggregator),
                    })
                }
            };
            self.merged.clear();
            port.done();
            port.counters.gave(given, counters);
            port.count_lost(counters);
            self.watch(number);
        }
    }

    /// The far end of a port may read again.
    pub(crate) fn go_on(&mut self, number: Number, counters: &mut Counters) {
        let Some(port) = self.port(number) else {
            return;
        };
        let Some(link) = port.link.as_mut().filter(|_| port.is_watched) else {
            return;
        };
        let dropped = link.go_on();
        let dropped = Given {
            gone: dropped,
            ..Given::default()
        };
        port.counters.took_back(dropped, counters);
        self.watch(number);
    }

    /// Gives ports what has arrived.
    pub(crate) fn arrive(&mut self, now_us: u64, counters: &mut Counters) {
        for _ in 0..ARRIVALS {
            let Some(number) = self.emulation.take(now_us) else {
                return;
            };
            let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
                continue;
            };
            let Some(link) = &mut port.link else {
                continue;
            };
            let arrived = self.emulation.arrived();
            let entered: Vec<Entered<'_>> = arrived.iter().map(|it| it.entered()).collect();
            self.pieces.clear();
            for (place, it) in (0..).zip(&entered) {
                let whole = Item::whole(place);
                // The far end may take less than when the frame was sent.
                let Some(offload) = it
                    .offload
                    .filter(|offload| !port.kept.leaves(&**link, offload, it.len()))
                else {
                    port.todo.push(whole);
                    continue;
                };
                let made = pieces_of(&mut self.pieces, it.bytes, offload);
                port.counters.was_cut(made.len() as u64 - 1, counters);
                port.todo.extend(made.map(|piece| Item {
                    form: Form::Piece(piece as u32),
                    ..whole
                }));
            }
            let given = link.send(Due {
                todo: &port.todo,
                entered: &entered,
                pieces: &self.pieces,
                edits: &self.edits,
                aggregator: None,
            });
            port.done();
            port.counters.took_back(given, counters);
            port.count_lost(counters);
            // A wire that is none any more, and is empty.
            port.is_slow = self.emulation.is_slow(number);
            self.watch(number);
        }
    }

    /// Waits for a client to read if frames wait for it, and else does not.
    #[inline]
    fn watch(&mut self, number: Number) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
            return;
        };
        let (Some(link), Some(_)) = (&port.link, &port.losses) else {
            return;
        };
        if link.is_waiting() != port.is_watched {
            port.is_watched = !port.is_watched;
            let mut flags = EventFlags::IN;
            flags.set(EventFlags::OUT, port.is_watched);
            let data = EventData::new_u64(u64::from(number));
            // It is in there, so the only error is a lack of memory: then it waits for the next frame.
            let _ = epoll::modify(&*self.epoll, link, data, flags);
        }
    }
}

/// Merges what can be of what is due to a port. How many frames are gone, and how many super-frames are there.
fn merge(
    (aggregator, merged): (&mut Aggregator, &mut Vec<Item>),
    limits: &Limits,
    due: Due<'_>,
) -> (u64, u64) {
    let gone = aggregator.run(limits, due.todo.len(), |at| {
        let out = due.out(&due.todo[at]);
        Single {
            head: out.head,
            body: out.body,
            missing: out.tail.map_or(0, |tail| tail.len()),
            offload: out.offload,
            is_valid: out.is_valid,
        }
    });
    let mut made = 0;
    merged.extend(aggregator.outcomes().map(|outcome| match outcome {
        Outcome::Frame(at) => due.todo[at as usize],
        Outcome::Made(it, first) => {
            made += 1;
            Item {
                place: due.todo[first as usize].place,
                form: Form::Made(it),
                edit: None,
            }
        }
    }));
    (gone as u64, made)
}

/// Ports of slow wires that are given frames in one turn.
const ARRIVALS: usize = 64;
