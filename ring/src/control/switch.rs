//! What operators ask of a switch.

use super::wire::{Malformed, Reader, Writer};

/// Asks something of a switch, or of one port of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchRequest {
    /// The switch, with or without `host:`; empty = all of them, to show.
    pub name: String,
    /// The port; 0 = the whole switch.
    pub port: u16,
    /// What is asked.
    pub ask: SwitchAsk,
}

/// What may be asked of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SwitchAsk {
    /// How it is: its settings and ports. The answer is Counters.
    Show {
        /// And where its stations are.
        stations: bool,
    },
    /// Set something. The answer is Done.
    Set {
        /// `key=value`; several with blanks between them.
        text: String,
        /// The next daemon sets it, too.
        keep: bool,
    },
    /// Close the port. The answer is Done.
    Kick,
}

impl SwitchRequest {
    pub(super) fn write(&self, w: &mut Writer) {
        let (action, text) = match &self.ask {
            SwitchAsk::Show { stations: false } => (SHOW, ""),
            SwitchAsk::Show { stations: true } => (SHOW_STATIONS, ""),
            SwitchAsk::Set { text, keep: false } => (SET, text.as_str()),
            SwitchAsk::Set { text, keep: true } => (SET_AND_KEEP, text.as_str()),
            SwitchAsk::Kick => (KICK, ""),
        };
        w.text(&self.name);
        w.u16(self.port);
        w.u8(action);
        w.text(text);
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let name = r.text("name")?;
        let port = r.u16("port")?;
        let action = r.u8("action")?;
        let text = r.text("text")?;
        let ask = match action {
            SHOW | SHOW_STATIONS => SwitchAsk::Show {
                stations: action == SHOW_STATIONS,
            },
            SET | SET_AND_KEEP => SwitchAsk::Set {
                text,
                keep: action == SET_AND_KEEP,
            },
            KICK => SwitchAsk::Kick,
            _ => return Err(Malformed::Value("action", u64::from(action))),
        };
        Ok(Self { name, port, ask })
    }
}

const SHOW: u8 = 0;
const SHOW_STATIONS: u8 = 1;
const SET: u8 = 2;
const SET_AND_KEEP: u8 = 3;
const KICK: u8 = 4;
