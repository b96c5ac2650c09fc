//! What an operator, a console's user or a grant says of a switch: any text is settings or an error, and
//! those of a port are read again as they are written.

use vnplug_switch::settings::{PortSettings, Settings};

/// Checks it with this text, valid UTF-8 or made so.
pub fn check(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut all = Settings::default();
    if all.apply(&text).is_err() {
        assert_eq!(all, Settings::default(), "an error changes nothing");
    }
    let mut port = PortSettings::default();
    if port.apply(&text).is_ok() {
        let pairs = port.pairs();
        let words: Vec<String> = pairs
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let mut again = PortSettings::default();
        again
            .apply(&words.join(" "))
            .expect("what was written is read");
        assert_eq!(again, port, "{words:?}");
    } else {
        assert_eq!(port, PortSettings::default(), "an error changes nothing");
    }
}
