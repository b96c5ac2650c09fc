//! The control queue (virtio 1.2, 5.1.6.5), which User-mode Linux leaves to the back-end. Every
//! command is answered: a driver that asks waits for that.

use super::memory::Memory;
use super::ring::{Broken, Part, Ring};
use super::spec::{MAX_PAIRS, control};

/// What a driver asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    /// It takes frames with these things left to it, from now on: bits as of features.
    Offloads(u64),
    /// How many pairs of rings it uses.
    Pairs(usize),
    /// Nothing that changes anything here.
    Nothing,
}

/// Answers the next command, which is obeyed before the answer is published. `None`: there is none.
///
/// # Errors
/// [`Broken`] if the ring makes no sense.
pub(crate) fn next(ring: &mut Ring, parts: &mut Vec<Part>) -> Result<Option<Command>, Broken> {
    if ring.available()? == 0 {
        return Ok(None);
    }
    let head = ring.head(0)?;
    parts.clear();
    let is_sound = ring.chain(head, parts).is_ok();
    let asks = parts.iter().take_while(|part| !part.is_for_guest).count();
    if is_sound && asks == 0 {
        // Buffers to receive in: the ring is one of a pair whose other one is still to come.
        return Ok(None);
    }
    let (asked, answered) = parts.split_at(asks);
    let command = match is_sound {
        true => read(ring.memory(), asked),
        false => None,
    };
    let answer = if command.is_some() {
        control::OK
    } else {
        control::ERR
    };
    let place = answered.iter().find(|part| part.len > 0);
    let said = place.is_some_and(|part| ring.memory().write(part.at, &[answer]));
    ring.give_back(head, u32::from(said));
    Ok(Some(command.unwrap_or(Command::Nothing)))
}

/// What the first parts of a chain ask for; `None` if it is nothing that we do.
fn read(memory: &Memory, parts: &[Part]) -> Option<Command> {
    // The longest that is looked at: class, command, and eight bytes.
    let mut bytes = [0; 10];
    let mut len = 0;
    for part in parts {
        let now = (part.len as usize).min(bytes.len() - len);
        memory
            .read(part.at, &mut bytes[len..len + now])
            .then_some(())?;
        len += now;
    }
    let (&[class, command], data) = bytes[..len].split_first_chunk()?;
    match (class, command) {
        // Every port is given all that is due to it, whatever its address.
        (control::RX | control::MAC, _) => Some(Command::Nothing),
        (control::MQ, 0) => {
            let pairs = usize::from(u16::from_le_bytes(*data.first_chunk()?));
            (1..=MAX_PAIRS)
                .contains(&pairs)
                .then_some(Command::Pairs(pairs))
        }
        (control::GUEST_OFFLOADS, 0) => {
            let bits = u64::from_le_bytes(*data.first_chunk()?);
            Some(Command::Offloads(bits))
        }
        _ => None,
    }
}
