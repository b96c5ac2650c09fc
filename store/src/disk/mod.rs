//! The door to the disk: every file operation of the recorder goes through one small trait.
