//! A switch is a wire whose ends are ports.
//!
//! It is a source like any other ([`vnplug_path::source::Queue`]): what its ports send is what is
//! received on it, so that every reader, filter and recorder works on it. One thread forwards, and may have others
//! beside it for what is between virtual machines (`lanes/`):
//!
//! ```text
//! a port's frames → decide (forward, table) → the other ports' ways out
//!                                           → the fanout: whoever captures on the switch
//! ```
//!
//! | file | what it has |
//! |---|---|
//! | `forward.rs` | which ports a frame is due to |
//! | `rules.rs` | what a port's settings mean for a frame: its VLAN, and in which form it leaves |
//! | `table.rs` | where stations are |
//! | `counts.rs` | what became of all frames |
//! | `config.rs` | what a switch is to be like |
//! | `queue.rs`, `queue/` | the source: a turn takes frames of the ports that have some, and forwards them |
//! | `turn.rs` | what happens to the frames of a turn |
//! | `batch.rs` | the frames of a turn |
//! | `lanes/` | threads that forward between guests beside the one of the switch |
//! | `link.rs` | how frames come from the far end of a port and go there, and who lets it join |
//! | `uplink.rs` | the port whose far end is an interface of the host: a source of the path and its way out |
//! | `twin/` | the kernel instance of the switch, for uplinks that are containers' |
//! | `exits/` | the ports: what a batch has for each, given to it at once |
//! | `direct.rs` | stations that members of trust groups reach without the switch |
//! | `edits.rs` | frames that leave with another VLAN tag than they came with |
//! | `clock.rs` | its time |
//! | `police.rs` | how much a port may send |
//! | `emulation.rs` | wires that are slow or bad on purpose |
//! | `settings.rs` | what an operator may say of a switch and of its ports |
//! | `board.rs` | what the daemon asks of it: rings that take part, grants, how it is |
//! | `show.rs` | what an operator sees of it, and changes at run time |
//! | `roster.rs` | which ports are taken, and by whom |
//! | `control.rs` | how other threads speak to the one that forwards |
//! | `entrances.rs` | which entrances there are, and how they come and go |
//! | `door.rs` | an entrance: made with the switch, opened later |
//! | `porter.rs` | what entrances have in common: threads, files, strangers |
//! | `backlog.rs` | frames that wait for a reader |
//! | `vhost/` | the entrance for virtual machines |
//! | `vde/` | the entrance for programs of VDE |
//! | `sockets/` | the entrances for plain sockets: `stream`, `bess`, `dgram` |

mod backlog;
mod batch;
mod board;
mod clock;
mod config;
mod control;
pub mod counts;
mod direct;
mod door;
mod edits;
mod emulation;
mod entrances;
mod exits;
pub mod forward;
mod lanes;
mod link;
mod police;
mod porter;
mod queue;
mod roster;
mod rules;
pub mod settings;
mod show;
mod sockets;
pub mod table;
mod turn;
mod twin;
mod uplink;
mod vde;
mod vhost;

pub use board::{Asked, Settling, Switchboard, check_grant};
pub use config::{SwitchConfig, VdeConfig};
pub use entrances::{EntranceChange, Gone};
pub use porter::Access;
pub use queue::Switch;
pub use roster::{Grant, Holder};
pub use show::{Shown, ShownPort, Station};
pub use sockets::door::SocketsConfig;
pub use twin::Twin;
pub use uplink::{OpenUplink, Uplink};
pub use vhost::door::VhostConfig;
