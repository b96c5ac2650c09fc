//! VLANs as `vde_switch` has them, said by the settings of ports.
//!
//! There, every port is in one VLAN without a tag (0 at first, 4095: none), and in any number with one; a VLAN
//! must be made before a port is put in. Port 0 is the host's, and has no client.

use std::fmt::Write;

use super::{Asked, EADDRINUSE, EEXIST, EINVAL, ENXIO, Failure, port_number};
use crate::forward::Number;
use crate::roster::{Roster, locked};
use crate::settings::PortSettings;

/// The VLAN of frames without a tag, as `vde_switch` says it.
pub(super) fn untagged(settings: &PortSettings) -> u16 {
    match settings.untagged {
        Some(vlan) => vlan,
        None if settings.tagged.is_empty() => 0,
        None => NONE,
    }
}

impl Asked<'_> {
    /// `port/setvlan`, `port/create`, `port/remove`, `port/epclose`.
    pub(super) fn change_port(&self, command: &str, argument: &str) -> Result<(), Failure> {
        let (port, value) = pair(argument)?;
        let port = port_number(port)?;
        let roster = locked(&self.board.roster);
        let is_said = roster.settings.ports.contains_key(&port);
        let is_held = roster.holder(port).is_some();
        if !is_said && !is_held && command != "port/create" {
            return Err(ENXIO.into());
        }
        let text = match command {
            "port/setvlan" => {
                let vlan = vlan(value, NONE)?;
                let has_tagged = !roster.settings.of(port).tagged.is_empty();
                match vlan {
                    // It would be in no VLAN, which is what a transparent port is.
                    NONE if !has_tagged => return Err(EINVAL.into()),
                    NONE => "vlan=no".to_owned(),
                    vlan if exists(&roster, vlan) => format!("vlan={vlan}"),
                    _ => return Err(ENXIO.into()),
                }
            }
            "port/create" if is_said || is_held => return Err(EEXIST.into()),
            "port/create" => {
                drop(roster);
                self.board.keep(port);
                return Ok(());
            }
            "port/remove" if is_held => return Err(EADDRINUSE.into()),
            "port/remove" => {
                drop(roster);
                self.board.forget(port);
                return Ok(());
            }
            _ => {
                // It has one endpoint, of the same number.
                if !is_held || value.parse() != Ok(port) {
                    return Err(ENXIO.into());
                }
                drop(roster);
                self.board.close(port)?;
                return self.settled();
            }
        };
        drop(roster);
        Ok(self.board.set(Some(port), &text)?)
    }

    /// `vlan/create`, `vlan/remove`, `vlan/addport`, `vlan/delport`.
    pub(super) fn change_vlan(&self, command: &str, argument: &str) -> Result<(), Failure> {
        let (first, port) = pair(argument)?;
        let vlan = vlan(first, NONE - 1)?;
        let mut roster = locked(&self.board.roster);
        let exists = exists(&roster, vlan);
        match command {
            "vlan/create" | "vlan/remove" if vlan == 0 => return Err(EINVAL.into()),
            "vlan/create" if exists => return Err(EEXIST.into()),
            "vlan/create" => {
                roster.settings.vlans.insert(vlan);
                return Ok(());
            }
            _ if !exists => return Err(ENXIO.into()),
            "vlan/remove" => {
                let members = roster.settings.ports.values();
                let default = std::iter::once(&roster.settings.default);
                if members.chain(default).any(|it| is_in(it, vlan)) {
                    return Err(EADDRINUSE.into());
                }
                roster.settings.vlans.remove(&vlan);
                return Ok(());
            }
            _ => {}
        }
        let port = port_number(port)?;
        if roster.holder(port).is_none() && !roster.settings.ports.contains_key(&port) {
            return Err(ENXIO.into());
        }
        let mut settings = roster.settings.of(port).clone();
        if untagged(&settings) == vlan {
            return match command {
                "vlan/addport" => Ok(()),
                _ => Err(EADDRINUSE.into()),
            };
        }
        if vlan == 0 {
            return Err(EINVAL.into());
        }
        // Before it has any: what has no tag stays in its VLAN.
        let native = match untagged(&settings) {
            NONE => "no".to_owned(),
            vlan => vlan.to_string(),
        };
        settings.tagged.put(vlan, command == "vlan/addport");
        if settings.tagged.is_empty() && native == "no" {
            // It would be in no VLAN.
            return Err(EINVAL.into());
        }
        drop(roster);
        let text = format!("trunk={} vlan={native}", settings.tagged);
        Ok(self.board.set(Some(port), &text)?)
    }

    /// `vlan/print`, `vlan/allprint`.
    pub(super) fn vlans(&self, argument: &str, has_idle: bool) -> Result<String, Failure> {
        let only = match argument {
            "" => None,
            text => Some(vlan(text, NONE - 1)?),
        };
        let roster = locked(&self.board.roster);
        if only.is_some_and(|vlan| !exists(&roster, vlan)) {
            return Err(ENXIO.into());
        }
        let mut ports: Vec<Number> = roster.numbers().collect();
        if has_idle {
            ports.extend(roster.settings.ports.keys());
            ports.sort_unstable();
            ports.dedup();
        }
        let mut text = String::new();
        let all = (0..NONE).filter(|vlan| exists(&roster, *vlan));
        for vlan in all.filter(|vlan| only.is_none_or(|only| only == *vlan)) {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "VLAN {vlan:04}");
            for port in &ports {
                let settings = roster.settings.of(*port);
                if is_in(settings, vlan) {
                    let is_active = u8::from(roster.holder(*port).is_some());
                    let is_tagged = u8::from(untagged(settings) != vlan);
                    let status = if settings.is_down {
                        "Discarding"
                    } else {
                        "Forwarding"
                    };
                    let _ = writeln!(
                        text,
                        " -- Port {port:04} tagged={is_tagged} active={is_active} status={status}"
                    );
                }
            }
        }
        Ok(text)
    }
}

/// Whether a port is in a VLAN.
fn is_in(settings: &PortSettings, vlan: u16) -> bool {
    untagged(settings) == vlan || settings.tagged.contains(vlan)
}

/// Whether there is a VLAN: it was made, or a port is in it.
fn exists(roster: &Roster, vlan: u16) -> bool {
    let settings = &roster.settings;
    let mut members = settings.ports.values().chain([&settings.default]);
    vlan == 0 || settings.vlans.contains(&vlan) || members.any(|it| is_in(it, vlan))
}

fn vlan(text: &str, most: u16) -> Result<u16, Failure> {
    let vlan = text.parse().ok().filter(|vlan| *vlan <= most);
    Ok(vlan.ok_or(EINVAL)?)
}

/// One or two words.
fn pair(argument: &str) -> Result<(&str, &str), Failure> {
    let mut words = argument.split_whitespace();
    let first = words.next().ok_or(EINVAL)?;
    Ok((first, words.next().unwrap_or_default()))
}

/// No VLAN.
const NONE: u16 = 4095;
