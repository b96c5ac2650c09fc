//! What readers say of their own work, kept for those who ask for their ports' counters.

use vnplug_ring::control::{Counted, code};

use super::{Hub, PortRecord, Refusal};

impl Hub {
    /// Keeps what a port's reader says; what it said before is forgotten.
    ///
    /// # Errors
    /// INVALID: more than 16 values, or a name that is none.
    pub fn note(&mut self, port: u32, values: Vec<(String, u64)>) -> Result<(), Refusal> {
        if values.len() > MOST || !values.iter().all(|(name, _)| is_name(name)) {
            let what = format!(
                "a note has at most {MOST} values, named by 1 to {LONGEST} of a to z, digits and _"
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        if let Some(record) = self.ports.get_mut(&port) {
            record.notes = values;
        }
        Ok(())
    }
}

impl PortRecord {
    /// Adds what the reader said to a port's counters.
    pub(super) fn tell_notes(&self, counted: &mut Counted) {
        let named = |(name, value): &(String, u64)| (format!("reader_{name}"), *value);
        counted.values.extend(self.notes.iter().map(named));
    }
}

fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (1..=LONGEST).contains(&name.len()) && name.bytes().all(fits)
}

const MOST: usize = 16;
const LONGEST: usize = 32;
