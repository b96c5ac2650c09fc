//! Foreign text as a terminal or a log may see it.

use std::fmt::Write as _;

/// `text` without anything a terminal would act on: control characters as `\xNN`, characters that
/// are invisible or change the direction of writing as `\u{…}`.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let hidden = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}');
        // Writing to a String cannot fail.
        let _ = match c {
            c if c.is_control() => write!(out, "\\x{:02x}", u32::from(c)),
            c if hidden => write!(out, "\\u{{{:x}}}", u32::from(c)),
            c => write!(out, "{c}"),
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_a_terminal_acts_on_survives() {
        assert_eq!(escape("eth1 – ä"), "eth1 – ä");
        assert_eq!(
            escape("\x1b[2Ja\r\n\t\u{9b}"),
            "\\x1b[2Ja\\x0d\\x0a\\x09\\x9b"
        );
        assert_eq!(escape("a\u{202e}b"), "a\\u{202e}b");
    }
}
