//! What a switch is to be like, and where clients come in.

use std::path::PathBuf;

use crate::settings::Settings;
use crate::sockets::door::SocketsConfig;
use crate::table::Limits;
use crate::vhost::door::VhostConfig;

/// What a switch is to be like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Its name.
    pub name: String,
    /// Stations that it knows, in all and at one port.
    pub stations: (usize, usize),
    /// What can be changed while it runs.
    pub settings: Settings,
    /// Bytes of the longest frame, Ethernet header included, FCS excluded.
    pub longest: usize,
    /// Ports in all, and of one user that is neither root nor the daemon's.
    pub ports: (usize, usize),
    /// Threads that forward between virtual machines, beside the one of the switch.
    pub lanes: usize,
    /// Where programs of VDE come in.
    pub vde: Option<VdeConfig>,
    /// Where machines come in by plain sockets.
    pub sockets: SocketsConfig,
    /// Where virtual machines come in.
    pub vhost: VhostConfig,
}

/// Where programs of VDE come in: the options of `vde_switch`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdeConfig {
    /// The directory of its sockets (`-s`).
    pub dir: PathBuf,
    /// Permission bits of the sockets (`-m`).
    pub mode: u32,
    /// Permission bits of the directory (`--dirmode`); by default what `mode` says.
    pub dir_mode: Option<u32>,
    /// Their group (`-g`).
    pub group: Option<u32>,
    /// The socket of the management console (`--mgmt`), and its permission bits.
    pub mgmt: Option<(PathBuf, u32)>,
    /// The user that the daemon will be, if it is not to stay what it is.
    pub user: Option<(u32, u32)>,
}

impl SwitchConfig {
    /// A switch of this name, without entrances.
    pub fn new(name: impl Into<String>) -> Self {
        let limits = Limits::default();
        Self {
            name: name.into(),
            stations: (limits.all, limits.each),
            settings: Settings::default(),
            longest: LONGEST,
            ports: (1024, 256),
            lanes: 0,
            vde: None,
            sockets: SocketsConfig::default(),
            vhost: VhostConfig::default(),
        }
    }
}

/// Bytes of a frame with an MTU of 9,216, with two tags.
const LONGEST: usize = 9216 + 14 + 8;
