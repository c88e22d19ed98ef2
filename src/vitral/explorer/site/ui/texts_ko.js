export const KOREAN = {};
