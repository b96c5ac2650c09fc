//! An address for the program from who gives them on the wire: asked for before the program has an interface, by the
//! supervisor, on its port of the switch. The program sends and sees nothing of it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use vnplug::{Next, Port};

use super::dhcp::{Answer, Asker, Lease};
use super::seen::Seen;
use super::{Dialler, WireError};

/// Asks until somebody gives an address, for some seconds.
///
/// # Errors
/// Nobody does.
pub(super) fn acquire(port: &mut Port, mac: [u8; 6]) -> Result<Lease, WireError> {
    let failed = |error: vnplug::Error| WireError(format!("cannot ask for an address: {error}"));
    let asker = new_asker(mac)?;
    let start = Instant::now();
    let mut offered: Option<Lease> = None;
    let mut wait = FIRST_WAIT;
    while start.elapsed() < PATIENCE {
        let message = match &offered {
            None => asker.discover(),
            Some(offer) => asker.request(offer),
        };
        port.send(&to_all(mac, &message)).map_err(failed)?;
        let until = Instant::now() + wait;
        wait *= 2;
        loop {
            let answer = match port.next().map_err(failed)? {
                Next::Packet(packet) => answer_in(packet.bytes, mac, asker),
                _ => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    port.wait(Some(left.min(LOOK))).map_err(failed)?;
                    None
                }
            };
            match (answer, &offered) {
                (Some(Answer::Offer(offer)), None) => {
                    offered = Some(offer);
                    wait = FIRST_WAIT;
                    break;
                }
                (Some(Answer::Ack(lease)), Some(offer))
                    if lease.address == offer.address && lease.server == offer.server =>
                {
                    return Ok(lease);
                }
                (Some(Answer::Refused), Some(_)) => {
                    offered = None;
                    break;
                }
                _ if Instant::now() >= until => break,
                _ => {}
            }
        }
    }
    Err(WireError(format!(
        "nobody gives an address on the wire (DHCP) within {} s: write address=…, or dhcp=off for what IPv6 gives itself",
        PATIENCE.as_secs()
    )))
}

/// Keeps a lease, until the wire is cut or nobody gives it any longer; says so then.
pub(super) fn keep(mut lease: Lease, mac: [u8; 6], dialler: &Dialler, cut: &Receiver<()>) -> bool {
    let mut since = Instant::now();
    while let Some(life) = lease.life {
        let (end, mut wait) = (since + life, life / 2);
        lease = loop {
            match cut.recv_timeout(wait) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return true,
            }
            match renewed(&lease, mac, dialler) {
                Ok(Some(lease)) => break lease,
                Ok(None) => return false,
                Err(error) => log::debug!("the address is not given for longer: {error}"),
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            // RFC 2131, 4.4.5: after half of what is left, and not too often.
            wait = (left / 2).max(AGAIN.min(left));
        };
        since = Instant::now();
    }
    // For ever.
    let _ = cut.recv();
    true
}

/// `None`: it is refused.
fn renewed(lease: &Lease, mac: [u8; 6], dialler: &Dialler) -> io::Result<Option<Lease>> {
    let asker = new_asker(mac).map_err(|error| io::Error::other(error.to_string()))?;
    let server = SocketAddr::new(lease.server.into(), SERVER);
    let own = SocketAddr::new(IpAddr::V4(lease.address), CLIENT);
    let socket = dialler.udp_from(own, server)?;
    socket.set_read_timeout(Some(ANSWER))?;
    socket.send(&asker.renew(lease))?;
    let until = Instant::now() + ANSWER;
    let mut message = [0; 1500];
    while Instant::now() < until {
        let length = socket.recv(&mut message)?;
        match asker.read(&message[..length]) {
            Some(Answer::Ack(next)) if next.address == lease.address => {
                return Ok(Some(next));
            }
            Some(Answer::Refused) => return Ok(None),
            _ => {}
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn new_asker(mac: [u8; 6]) -> Result<Asker, WireError> {
    let mut number = [0; 4];
    let filled = rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty());
    filled.map_err(WireError::system("have a random number"))?;
    let number = u32::from_ne_bytes(number);
    Ok(Asker { mac, number })
}

/// The frame of a message to whoever gives addresses.
fn to_all(mac: [u8; 6], message: &[u8]) -> Vec<u8> {
    let length = |more: usize| ((message.len() + more) as u16).to_be_bytes();
    let mut head = vec![0x45, 0];
    head.extend(length(28));
    head.extend([0, 0, 0, 0, 64, UDP, 0, 0]);
    head.extend(Ipv4Addr::UNSPECIFIED.octets());
    head.extend(Ipv4Addr::BROADCAST.octets());
    let words = head.as_chunks::<2>().0.iter();
    let sum: u32 = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    head[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    let mut frame = [&[0xff; 6][..], &mac, &[8, 0], &head].concat();
    for port in [CLIENT, SERVER] {
        frame.extend(port.to_be_bytes());
    }
    frame.extend(length(8));
    // UDP without a checksum (RFC 768).
    frame.extend([0, 0]);
    frame.extend(message);
    frame
}

fn answer_in(frame: &[u8], mac: [u8; 6], asker: Asker) -> Option<Answer> {
    let to = frame.get(..6)?;
    let Seen::Ip(packet) = Seen::of(frame) else {
        return None;
    };
    let is_it = (to == mac || to == [0xff; 6])
        && packet.protocol == UDP
        && packet.to.is_ipv4()
        && !packet.more
        && !packet.later
        && packet.ports() == Some((SERVER, CLIENT));
    is_it.then(|| asker.read(packet.body.get(8..)?)).flatten()
}

const UDP: u8 = 17;
const SERVER: u16 = 67;
const CLIENT: u16 = 68;
/// How long it is asked for.
const PATIENCE: Duration = Duration::from_secs(6);
/// A question is asked again after this, and then after twice as long.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(100);
/// A server that gives an address for longer answers within this.
const ANSWER: Duration = Duration::from_secs(3);
/// It is asked no more often.
const AGAIN: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frame_is_read_as_it_was_written() {
        let asker = Asker {
            mac: [2, 0, 0, 0, 0, 9],
            number: 7,
        };
        let frame = to_all(asker.mac, &asker.discover());
        let Seen::Ip(packet) = Seen::of(&frame) else {
            panic!("an IP packet");
        };
        assert_eq!(packet.ports(), Some((CLIENT, SERVER)));
        assert_eq!(packet.body.len(), 8 + 300);
        // The sum over a header and its own sum is all ones (RFC 791, 3.1).
        let words = frame[14..34].as_chunks::<2>().0.iter();
        let sum: u32 = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        // Nobody takes his own question for an answer.
        assert_eq!(answer_in(&frame, asker.mac, asker), None);
    }
}
