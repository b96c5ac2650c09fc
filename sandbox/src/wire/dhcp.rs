//! Messages of DHCP for IPv4 (RFC 2131, RFC 2132): those that a client sends, and what a server's say. A server is a
//! stranger: what does not fit together is no answer.

use std::net::Ipv4Addr;
use std::time::Duration;

/// What a server gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The address.
    pub address: Ipv4Addr,
    /// Bits of its network.
    pub bits: u8,
    /// Who has the way to other networks.
    pub router: Option<Ipv4Addr>,
    /// Who is asked for names.
    pub dns: Vec<Ipv4Addr>,
    /// Who gives it.
    pub server: Ipv4Addr,
    /// For how long; `None`: for ever.
    pub life: Option<Duration>,
}

/// A server's message for us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It would give this.
    Offer(Lease),
    /// It gives this.
    Ack(Lease),
    /// It does not give what was asked for.
    Refused,
}

/// Who asks, and for the how-many-th time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// The hardware address.
    pub mac: [u8; 6],
    /// By which answers are known.
    pub number: u32,
}

impl Asker {
    /// Who gives addresses?
    #[must_use]
    pub fn discover(self) -> Vec<u8> {
        self.message(DISCOVER, Ipv4Addr::UNSPECIFIED, &[])
    }

    /// That one, please.
    #[must_use]
    pub fn request(self, offer: &Lease) -> Vec<u8> {
        let options = [(REQUESTED, offer.address), (SERVER, offer.server)];
        self.message(REQUEST, Ipv4Addr::UNSPECIFIED, &options)
    }

    /// May it be ours for longer? Sent from that address to who gave it.
    #[must_use]
    pub fn renew(self, lease: &Lease) -> Vec<u8> {
        self.message(REQUEST, lease.address, &[])
    }

    fn message(self, kind: u8, own: Ipv4Addr, options: &[(u8, Ipv4Addr)]) -> Vec<u8> {
        let mut message = vec![BOOT_REQUEST, ETHERNET, 6, 0];
        message.extend(self.number.to_be_bytes());
        // An interface without an address takes what is sent to all.
        let flags: u16 = if own.is_unspecified() { 0x8000 } else { 0 };
        message.extend([0, 0]);
        message.extend(flags.to_be_bytes());
        message.extend(own.octets());
        message.resize(HARDWARE, 0);
        message.extend(self.mac);
        message.resize(COOKIE_AT, 0);
        message.extend(COOKIE);
        message.extend([KIND, 1, kind]);
        for (name, address) in options {
            message.extend([*name, 4]);
            message.extend(address.octets());
        }
        message.extend([WISHES, 4, MASK, ROUTER, DNS, LIFE, END]);
        // Some servers take no shorter ones: BOOTP's have 300 bytes (RFC 1542, 2.1).
        message.resize(message.len().max(300), 0);
        message
    }

    /// What a message says to this asker; `None`: nothing, or nothing that can be.
    #[must_use]
    pub fn read(self, message: &[u8]) -> Option<Answer> {
        let (head, rest) = message.split_at_checked(COOKIE_AT)?;
        let is_ours = head[..3] == [BOOT_REPLY, ETHERNET, 6]
            && head[4..8] == self.number.to_be_bytes()
            && head[HARDWARE..HARDWARE + 6] == self.mac;
        let options = Options::of(rest.strip_prefix(&COOKIE)?)?;
        if !is_ours {
            return None;
        }
        let kind = match options.kind? {
            REFUSAL => return Some(Answer::Refused),
            kind => kind,
        };
        let address = Ipv4Addr::new(head[16], head[17], head[18], head[19]);
        let bits = options.mask?;
        let server = options.server.filter(|server| is_host(*server))?;
        let is_free = is_host(address) && is_inside(address, bits);
        let life = match options.life? {
            u32::MAX => None,
            seconds if seconds < LEAST_LIFE => return None,
            seconds => Some(Duration::from_secs(seconds.into())),
        };
        let router = options.router.filter(|router| {
            let same = Ipv4Addr::to_bits(address) ^ router.to_bits();
            is_host(*router)
                && is_inside(*router, bits)
                && *router != address
                && same >> (32 - bits) == 0
        });
        let dns = options.dns.into_iter().filter(|server| is_host(*server));
        let lease = Lease {
            address,
            bits,
            router,
            dns: dns.take(MOST_DNS).collect(),
            server,
            life,
        };
        match kind {
            _ if !is_free => None,
            OFFER => Some(Answer::Offer(lease)),
            ACK => Some(Answer::Ack(lease)),
            _ => None,
        }
    }
}

/// The options that count.
#[derive(Debug, Default)]
struct Options {
    kind: Option<u8>,
    mask: Option<u8>,
    router: Option<Ipv4Addr>,
    dns: Vec<Ipv4Addr>,
    server: Option<Ipv4Addr>,
    life: Option<u32>,
}

impl Options {
    /// `None`: one of them is cut, has another length than its kind, or is there twice.
    fn of(mut bytes: &[u8]) -> Option<Self> {
        let mut options = Self::default();
        let mut seen = [false; 256];
        loop {
            let (name, rest) = match bytes {
                [] | [END, ..] => return Some(options),
                [0, rest @ ..] => {
                    bytes = rest;
                    continue;
                }
                [name, length, rest @ ..] => {
                    let (value, next) = rest.split_at_checked(usize::from(*length))?;
                    bytes = next;
                    (*name, value)
                }
                [_] => return None,
            };
            let counts = matches!(name, KIND | MASK | ROUTER | DNS | SERVER | LIFE);
            if counts && std::mem::replace(&mut seen[usize::from(name)], true) {
                return None;
            }
            let word = || <[u8; 4]>::try_from(rest).ok();
            match name {
                KIND => options.kind = Some(*<&[u8; 1]>::try_from(rest).ok()?.first()?),
                MASK => options.mask = Some(bits_of(u32::from_be_bytes(word()?))?),
                ROUTER => options.router = Some(*addresses(rest)?.first()?),
                DNS => options.dns = addresses(rest)?,
                SERVER => options.server = Some(word()?.into()),
                LIFE => options.life = Some(u32::from_be_bytes(word()?)),
                _ => {}
            }
        }
    }
}

fn addresses(bytes: &[u8]) -> Option<Vec<Ipv4Addr>> {
    let whole = !bytes.is_empty() && bytes.len().is_multiple_of(4);
    let words = bytes.as_chunks::<4>().0.iter();
    whole.then(|| words.map(|word| Ipv4Addr::from(*word)).collect())
}

/// Bits of a mask, if it is one, and leaves hosts beside us.
fn bits_of(mask: u32) -> Option<u8> {
    let bits = mask.leading_ones();
    let is_whole = mask.trailing_zeros() + bits == 32;
    let bits = u8::try_from(bits).ok()?;
    (is_whole && (8..=30).contains(&bits)).then_some(bits)
}

/// Whether it can be the address of somebody else on a network.
fn is_host(address: Ipv4Addr) -> bool {
    !(address.octets()[0] == 0
        || address.is_loopback()
        || address.is_link_local()
        || address.octets()[0] >= 224)
}

/// Whether it is neither the network's own address nor that of all in it.
fn is_inside(address: Ipv4Addr, bits: u8) -> bool {
    let hosts = u32::MAX >> bits;
    let host = address.to_bits() & hosts;
    host != 0 && host != hosts
}

const BOOT_REQUEST: u8 = 1;
const BOOT_REPLY: u8 = 2;
const ETHERNET: u8 = 1;
/// Where the hardware address stands.
const HARDWARE: usize = 28;
const COOKIE_AT: usize = 236;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
const MASK: u8 = 1;
const ROUTER: u8 = 3;
const DNS: u8 = 6;
const REQUESTED: u8 = 50;
const LIFE: u8 = 51;
const KIND: u8 = 53;
const SERVER: u8 = 54;
const WISHES: u8 = 55;
const END: u8 = 255;
const DISCOVER: u8 = 1;
const OFFER: u8 = 2;
const REQUEST: u8 = 3;
const ACK: u8 = 5;
const REFUSAL: u8 = 6;
/// Servers for names that are taken.
const MOST_DNS: usize = 3;
/// Seconds; who gives an address for less would have us ask all the time.
const LEAST_LIFE: u32 = 60;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(super) const ASKER: Asker = Asker {
        mac: [2, 0, 0, 0, 0, 9],
        number: 0x0102_0304,
    };

    fn usual() -> Vec<(u8, Vec<u8>)> {
        vec![
            (KIND, vec![OFFER]),
            (MASK, vec![255, 255, 255, 0]),
            (ROUTER, vec![10, 0, 0, 1]),
            (DNS, vec![10, 0, 0, 1, 10, 0, 0, 2]),
            (LIFE, 3600_u32.to_be_bytes().to_vec()),
            (SERVER, vec![10, 0, 0, 1]),
        ]
    }

    fn reply(address: [u8; 4], options: &[(u8, Vec<u8>)]) -> Vec<u8> {
        let mut message = ASKER.discover()[..COOKIE_AT + 4].to_vec();
        message[0] = BOOT_REPLY;
        message[16..20].copy_from_slice(&address);
        for (name, value) in options {
            message.extend([*name, value.len() as u8]);
            message.extend(value);
        }
        message.push(END);
        message
    }

    #[test]
    fn an_offer_is_read() {
        let message = reply([10, 0, 0, 77], &usual());
        let lease = Lease {
            address: [10, 0, 0, 77].into(),
            bits: 24,
            router: Some([10, 0, 0, 1].into()),
            dns: vec![[10, 0, 0, 1].into(), [10, 0, 0, 2].into()],
            server: [10, 0, 0, 1].into(),
            life: Some(Duration::from_secs(3600)),
        };
        assert_eq!(ASKER.read(&message), Some(Answer::Offer(lease)));
        for length in 0..message.len() - 1 {
            // A message that ends between two options lacks one that must be there.
            let _ = ASKER.read(&message[..length]);
        }
        let other = Asker { number: 7, ..ASKER };
        assert_eq!(other.read(&message), None);
    }

    #[test]
    fn what_cannot_be_is_no_answer() {
        let with = |name: u8, value: &[u8]| {
            let mut options = usual();
            options.retain(|(own, _)| *own != name);
            options.push((name, value.to_vec()));
            ASKER.read(&reply([10, 0, 0, 77], &options))
        };
        for (name, value) in [
            (MASK, &[255, 0, 255, 0][..]),
            (MASK, &[0, 0, 0, 0]),
            (MASK, &[255, 255, 255, 255]),
            (MASK, &[255, 255, 255]),
            (LIFE, &[0, 0, 0, 1]),
            (LIFE, &[0, 0, 1]),
            (KIND, &[OFFER, OFFER]),
            (KIND, &[9]),
            (SERVER, &[127, 0, 0, 1]),
            (SERVER, &[10, 0, 0]),
            (ROUTER, &[10, 0, 0]),
            (DNS, &[]),
        ] {
            assert_eq!(with(name, value), None, "{name} {value:?}");
        }
        for address in [
            [0, 0, 0, 0],
            [127, 0, 0, 9],
            [169, 254, 1, 1],
            [224, 0, 0, 1],
            [255; 4],
            [10, 0, 0, 0],
            [10, 0, 0, 255],
        ] {
            assert_eq!(ASKER.read(&reply(address, &usual())), None, "{address:?}");
        }
        let mut twice = usual();
        twice.push((MASK, vec![255, 255, 0, 0]));
        assert_eq!(ASKER.read(&reply([10, 0, 0, 77], &twice)), None);
        // A router elsewhere and a name server that is nobody are left away.
        for router in [
            [10, 9, 9, 9],
            [10, 0, 0, 0],
            [10, 0, 0, 255],
            [10, 0, 0, 77],
        ] {
            let Some(Answer::Offer(lease)) = with(ROUTER, &router) else {
                panic!()
            };
            assert_eq!(lease.router, None, "{router:?}");
        }
        let Some(Answer::Offer(lease)) = with(DNS, &[127, 0, 0, 1, 10, 0, 0, 3]) else {
            panic!()
        };
        assert_eq!(lease.dns, [Ipv4Addr::new(10, 0, 0, 3)]);
    }
}
