//! Carries frames between two sources, both ways, from where they were received: a bridge of two ports.
//!
//! ```text
//! forward eth1 eth2
//! ```

use vnplug::{Bundle, Direction, Error, Next, Port, PortOptions};

fn main() -> Result<(), Error> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [one, other] = &names[..] else {
        eprintln!("forward SOURCE SOURCE");
        std::process::exit(2);
    };
    let mut bundle = Bundle::new()?;
    for name in [one, other] {
        // What the source itself sends is not received again.
        let options = PortOptions::new(name).direction(Direction::Rx);
        bundle.open(options.transmit(1 << 20).posts())?;
    }
    loop {
        bundle.wait(None)?;
        let [one, other] = bundle.ports() else {
            continue;
        };
        carry(one, other)?;
        carry(other, one)?;
    }
}

/// Sends on what `from` has, by `to`. What finds no room is dropped, as by any bridge.
fn carry(from: &mut Port, to: &mut Port) -> Result<(), Error> {
    // Again after a restart of the daemon, and for nothing meanwhile.
    match from.lend_to(to) {
        Ok(()) => {}
        // One of them is away, and comes back while it is waited for.
        Err(Error::Disconnected) => return Ok(()),
        Err(error) => return Err(error),
    }
    let outbox = to.outbox()?;
    for _ in 0..AT_ONCE {
        // Also says why, if there is nothing any more.
        let Next::Packet(packet) = from.next()? else {
            break;
        };
        let _sent = outbox.forward(&[], packet.bytes)?;
    }
    outbox.flush();
    Ok(())
}

/// Frames until the other way has its turn.
const AT_ONCE: usize = 256;
