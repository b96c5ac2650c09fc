//! Network interfaces of virtual machines on a switch: what is asked for, and where the switch lets
//! machines in.

use std::str::FromStr;

use vnplug::Client;
use vnplug_ring::control::{ENTRANCE_PREFIX, HOST_PREFIX};

use crate::failure::Failure;
use crate::interface::words;

/// How a machine joins a switch: an entrance, by the name of its option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Via {
    /// vhost-user: the switch reads and writes the guest's memory.
    Vhost,
    /// A stream of frames with lengths.
    Stream,
    /// A pair of datagram sockets.
    Dgram,
    /// A connection of packets.
    Bess,
    /// The protocol of VDE.
    Vde,
}

/// An interface on a switch, as `--nic` has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NicSpec {
    pub(crate) switch: String,
    pub(crate) mac: Option<[u8; 6]>,
    pub(crate) model: Option<String>,
    /// The one way that is to be taken.
    pub(crate) via: Option<Via>,
}

/// Where a switch lets machines in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entrances {
    pub(crate) switch: String,
    found: Vec<(Via, String)>,
}

impl Via {
    const ALL: [Self; 5] = [
        Self::Vhost,
        Self::Stream,
        Self::Dgram,
        Self::Bess,
        Self::Vde,
    ];

    /// The name of the entrance's option.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Vhost => "vhost",
            Self::Stream => "stream",
            Self::Dgram => "dgram",
            Self::Bess => "bess",
            Self::Vde => "vde",
        }
    }
}

impl FromStr for Via {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|via| via.word() == text);
        found.ok_or_else(|| {
            let words = Self::ALL.map(Self::word).join(", ");
            format!("{text:?} is no way into a switch; there are {words}")
        })
    }
}

impl FromStr for NicSpec {
    type Err = String;

    /// `SWITCH[,mac=ADDRESS][,model=DRIVER][,via=ENTRANCE]`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let switch = parts.next().unwrap_or_default();
        let switch = switch.strip_prefix(HOST_PREFIX).unwrap_or(switch);
        if switch.is_empty() {
            return Err("write SWITCH or SWITCH,mac=ADDRESS, for example lan0".into());
        }
        let mut spec = Self {
            switch: switch.to_owned(),
            mac: None,
            model: None,
            via: None,
        };
        for part in parts {
            match part.split_once('=') {
                Some(("mac", value)) => spec.mac = Some(words::mac(value)?),
                Some(("model", value)) => spec.model = Some(value.to_owned()),
                Some(("via", value)) => spec.via = Some(value.parse()?),
                _ => return Err(format!("{part:?} is not mac=, model= or via=")),
            }
        }
        Ok(spec)
    }
}

impl NicSpec {
    /// Its address: what was said, or one that follows from these names and from this host's, so that no
    /// two machines have the same and each has the same again.
    pub(crate) fn mac_for(&self, vm: &str) -> String {
        let mac = self.mac.unwrap_or_else(|| {
            let host = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
            let text = format!("{host} {vm} {}", self.switch);
            let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
            let [.., a, b, c, d, e] = hash.to_be_bytes();
            // Of nobody's range: locally administered.
            [0x02, a, b, c, d, e]
        });
        mac.map(|byte| format!("{byte:02x}")).join(":")
    }
}

impl Entrances {
    /// Those of a switch of this daemon.
    ///
    /// # Errors
    /// There is no such switch, or the daemon does not answer.
    pub(crate) fn of(client: &mut Client, switch: &str) -> Result<Self, Failure> {
        let all = client.stats()?;
        let label = |labels: &[(String, String)], key: &str| {
            let found = labels.iter().find(|(name, _)| name == key);
            found.map(|(_, value)| value.clone())
        };
        let is_switch = |labels: &[(String, String)]| {
            label(labels, "kind").is_some_and(|kind| kind == "switch")
        };
        let switches = all
            .iter()
            .filter(|it| it.kind == "source" && is_switch(&it.labels));
        let Some(found) = switches.clone().find(|it| it.name == switch) else {
            let names: Vec<&str> = switches.map(|it| it.name.as_str()).collect();
            let text = match names.is_empty() {
                true => "the daemon has no switch (or you may not see it: run this as root)".into(),
                false => format!("there is no such switch; there are {}", names.join(", ")),
            };
            return Err(Failure::about(switch, text));
        };
        let path = |via: Via| {
            let key = format!("{ENTRANCE_PREFIX}{}", via.word());
            label(&found.labels, &key).map(|path| (via, path))
        };
        Ok(Self {
            switch: switch.to_owned(),
            found: Via::ALL.into_iter().filter_map(path).collect(),
        })
    }

    /// Where this one is, if the switch has it.
    pub(crate) fn path(&self, via: Via) -> Option<&str> {
        let found = self.found.iter().find(|(kind, _)| *kind == via);
        found.map(|(_, path)| path.as_str())
    }

    /// The switch lacks what is needed: which options to give it.
    pub(crate) fn lacks(&self, what: &str) -> Failure {
        let has: Vec<&str> = self.found.iter().map(|(via, _)| via.word()).collect();
        let has = match has.is_empty() {
            true => "none".to_owned(),
            false => has.join(", "),
        };
        Failure::about(
            &self.switch,
            format!("the switch has no entrance that this machine can take (it has {has}): {what}"),
        )
    }

    #[cfg(test)]
    pub(crate) fn made(found: &[(Via, &str)]) -> Self {
        let found = found.iter().map(|(via, path)| (*via, (*path).to_owned()));
        Self {
            switch: "lan0".into(),
            found: found.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_is_a_switch_and_perhaps_more() {
        let spec: NicSpec = "host:lan0,mac=52:54:00:00:00:01,model=e1000,via=dgram"
            .parse()
            .unwrap();
        let expected = NicSpec {
            switch: "lan0".into(),
            mac: Some([0x52, 0x54, 0, 0, 0, 1]),
            model: Some("e1000".into()),
            via: Some(Via::Dgram),
        };
        assert_eq!(spec, expected);
        assert_eq!(spec.mac_for("a"), "52:54:00:00:00:01");
        for bad in ["", ",mac=52:54:00:00:00:01", "lan0,via=x", "lan0,mtu=9"] {
            assert!(bad.parse::<NicSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn each_machine_has_an_address_of_its_own_and_the_same_again() {
        let spec: NicSpec = "lan0".parse().unwrap();
        let other: NicSpec = "lan1".parse().unwrap();
        assert_eq!(spec.mac_for("a"), spec.mac_for("a"));
        assert_ne!(spec.mac_for("a"), spec.mac_for("b"));
        assert_ne!(spec.mac_for("a"), other.mac_for("a"));
        assert!(spec.mac_for("a").starts_with("02:"));
    }
}
