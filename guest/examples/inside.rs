//! Agent and reader in one process, for trying a guest: prints a line per packet of one device.
//!
//! ```text
//! inside host:eth1
//! ```

use std::time::Duration;

use vnplug::agent::{self, AgentConfig};
use vnplug::{Error, Next, Port, PortOptions};

fn main() -> Result<(), Error> {
    let device = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "host:eth0".into());
    let config = AgentConfig::default();
    let socket = config.socket.clone();
    let agent = std::thread::spawn(|| agent::run(config));
    let mut port = loop {
        if agent.is_finished() {
            return agent.join().unwrap_or(Err(Error::Disconnected));
        }
        match PortOptions::new(device.as_str()).socket(&socket).open() {
            Ok(port) => break port,
            Err(error) if error.heals() => std::thread::sleep(Duration::from_millis(50)),
            Err(error) => return Err(error),
        }
    };
    println!("open {}", port.device());
    read(&mut port)
}

fn read(port: &mut Port) -> Result<(), Error> {
    loop {
        match port.next()? {
            Next::Packet(packet) => {
                let text = String::from_utf8_lossy(packet.bytes)
                    .escape_debug()
                    .to_string();
                println!(
                    "{text} flags {:#x} lost {}",
                    packet.meta.flags, packet.meta.lost
                );
            }
            Next::Nothing => {
                port.wait(None)?;
            }
            Next::Ended => return Ok(()),
        }
    }
}
