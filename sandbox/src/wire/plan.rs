//! What is said of a wire on the command line: `lan0,address=10.0.0.9/24,gateway=10.0.0.1`.

use std::net::IpAddr;
use std::str::FromStr;

/// A wire that somebody wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WirePlan {
    /// The switch, as the daemon names it, or the device of `vnplug list`.
    pub switch: String,
    /// The program's addresses, each with the bits of its network.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Who has the way to all other networks.
    pub gateway: Option<IpAddr>,
    /// Who is asked for names.
    pub dns: Vec<IpAddr>,
    /// Hardware address; else a random one.
    pub mac: Option<[u8; 6]>,
    /// Largest frame without its Ethernet header; else the switch's.
    pub mtu: Option<u16>,
    /// False: the calls alone decide, every frame passes.
    pub fence: bool,
    /// Somebody on the wire may give an address (DHCP), if none is said.
    pub dhcp: bool,
}

impl WirePlan {
    /// Whether an address is asked for on the wire.
    #[must_use]
    pub fn leases(&self) -> bool {
        self.dhcp && self.addresses.is_empty()
    }

    /// The daemon's device.
    #[must_use]
    pub fn device(&self) -> String {
        match self.switch.contains(':') {
            true => self.switch.clone(),
            false => format!("host:{}", self.switch),
        }
    }
}

impl FromStr for WirePlan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let switch = words.next().unwrap_or_default();
        if switch.is_empty() || switch.contains('=') {
            return Err("first comes the switch: lan0,address=10.0.0.9/24".to_owned());
        }
        let mut plan = Self {
            switch: switch.to_owned(),
            addresses: Vec::new(),
            gateway: None,
            dns: Vec::new(),
            mac: None,
            mtu: None,
            fence: true,
            dhcp: true,
        };
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            match key {
                "address" => plan.addresses.push(network(value)?),
                "gateway" => plan.gateway = Some(address(value)?),
                "dns" => plan.dns.push(address(value)?),
                "mac" => plan.mac = Some(mac(value)?),
                "mtu" => plan.mtu = Some(mtu(value)?),
                "fence" => plan.fence = switched("fence", value)?,
                "dhcp" => plan.dhcp = switched("dhcp", value)?,
                _ => {
                    return Err(format!(
                        "`{word}` is none of address, gateway, dns, mac, mtu, dhcp, fence"
                    ));
                }
            }
        }
        if let Some(gateway) = plan.gateway
            && !plan
                .addresses
                .iter()
                .any(|&network| is_on(network, gateway))
        {
            return Err(format!(
                "no address is on the network of the gateway {gateway}"
            ));
        }
        Ok(plan)
    }
}

fn address(text: &str) -> Result<IpAddr, String> {
    text.parse().map_err(|_| format!("`{text}` is no address"))
}

fn network(text: &str) -> Result<(IpAddr, u8), String> {
    let wrong =
        || format!("`{text}` is no address with its network's bits; write for example 10.0.0.9/24");
    let (own, bits) = text.split_once('/').ok_or_else(wrong)?;
    let own = address(own)?;
    let most = if own.is_ipv4() { 32 } else { 128 };
    match bits.parse() {
        Ok(bits) if bits <= most && !own.is_unspecified() && !own.is_multicast() => Ok((own, bits)),
        _ => Err(wrong()),
    }
}

fn is_on((own, bits): (IpAddr, u8), other: IpAddr) -> bool {
    let (own, other, width) = match (own, other) {
        (IpAddr::V4(own), IpAddr::V4(other)) => (own.to_bits().into(), other.to_bits().into(), 32),
        (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits(), other.to_bits(), 128),
        _ => return false,
    };
    let differ: u128 = own ^ other;
    differ.checked_shr(width - u32::from(bits)).unwrap_or(0) == 0
}

fn mac(text: &str) -> Result<[u8; 6], String> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|byte| {
            u8::from_str_radix(byte, 16)
                .ok()
                .filter(|_| byte.len() == 2 && !byte.starts_with('+'))
        })
        .collect();
    let mac: Option<[u8; 6]> = bytes.and_then(|bytes| bytes.try_into().ok());
    mac.filter(|mac| mac[0] & 1 == 0 && *mac != [0; 6])
        .ok_or_else(|| {
            format!("`{text}` is no address of one interface; write for example 02:00:00:00:00:01")
        })
}

fn mtu(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(bytes @ 68..=65521) => Ok(bytes),
        _ => Err(format!("`{text}`: an MTU has 68 to 65521 bytes")),
    }
}

fn switched(key: &str, text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("`{key}={text}`: on or off")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_can_be_said_is_understood() {
        let text = "lan0,address=10.0.0.9/24,address=fd00::9/64,gateway=10.0.0.1,dns=10.0.0.1,mac=02:00:00:00:00:09,mtu=9000,fence=off";
        let plan: WirePlan = text.parse().unwrap();
        assert_eq!(plan.device(), "host:lan0");
        assert_eq!(plan.addresses.len(), 2);
        assert_eq!(plan.gateway, Some([10, 0, 0, 1].into()));
        assert_eq!((plan.mtu, plan.fence), (Some(9000), false));
        assert_eq!(plan.mac, Some([2, 0, 0, 0, 0, 9]));
        let plan: WirePlan = "vm:lan0".parse().unwrap();
        assert_eq!((plan.device().as_str(), plan.fence), ("vm:lan0", true));
        assert!(plan.leases());
        let plan: WirePlan = "lan0,dhcp=off".parse().unwrap();
        assert!(!plan.leases());
    }

    #[test]
    fn what_cannot_be_is_said() {
        for (text, why) in [
            ("", "first comes the switch"),
            ("address=10.0.0.9/24", "first comes the switch"),
            ("lan0,addres=10.0.0.9/24", "none of"),
            ("lan0,address=10.0.0.9", "10.0.0.9/24"),
            ("lan0,address=10.0.0.9/33", "10.0.0.9/24"),
            ("lan0,address=224.0.0.1/24", "10.0.0.9/24"),
            ("lan0,gateway=10.0.0.1", "no address is on the network"),
            (
                "lan0,address=10.0.0.9/24,gateway=10.0.1.1",
                "no address is on the network",
            ),
            ("lan0,mac=03:00:00:00:00:01", "one interface"),
            ("lan0,mtu=20", "68 to"),
            ("lan0,fence", "on or off"),
            ("lan0,dhcp=no", "`dhcp=no`: on or off"),
        ] {
            let told = text.parse::<WirePlan>().unwrap_err();
            assert!(told.contains(why), "{text}: {told}");
        }
    }

    #[test]
    fn the_gateway_of_everything_is_on_a_network_of_no_bits() {
        assert!(is_on(([10, 0, 0, 1].into(), 0), [1, 1, 1, 1].into()));
        assert!(is_on(
            ("::1".parse().unwrap(), 0),
            "fe80::1".parse().unwrap()
        ));
        assert!(!is_on(
            ([10, 0, 0, 1].into(), 0),
            "fe80::1".parse().unwrap()
        ));
    }
}
